"""The radix tree against a model of single blocks: a dict from the tokens up to a block's end to what is known of it.

All blocks of a node have one history, so the model needs no nodes: it looks at every block to find the next to go.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipc.codec import pack_ints
from scheduler_proc.eviction import make_eviction
from scheduler_proc.radix_tree import Node, RadixTree

BLOCK = 2
NUM_DEVICE = 24
NUM_HOST = 12

Run = tuple[tuple[int, ...], ...]  # token ids of blocks
Path = tuple[str, Run]  # namespace; the blocks from the root down

namespaces = st.sampled_from(["", "tenant"])
runs = st.lists(st.sampled_from([(1, 2), (1, 3)]), max_size=6).map(tuple)


def pack(run: Run) -> bytes:
    return pack_ints([token for block in run for token in block])


@dataclass
class Block:
    """A cached block, in the model."""

    number: int
    on_host: bool
    last_used: int
    uses: int
    created: int
    plan_after: int = -1


RANKS: dict[str, Callable[[Block], tuple[int, ...]]] = {
    "lru": lambda block: (block.last_used,),
    "lfu": lambda block: (block.uses, block.last_used),
    "fifo": lambda block: (block.created,),
}


@dataclass
class Held:
    """One lock."""

    node: Node
    path: Path


class TreeMachine(RuleBasedStateMachine):
    """Random calls on the tree and the model; ids that neither tier of the tree holds lie in the two free lists."""

    def __init__(self) -> None:
        super().__init__()
        self.free = list(range(NUM_DEVICE))
        self.free_host = list(range(100, 100 + NUM_HOST))
        self.model: dict[Path, Block] = {}
        self.held: list[Held] = []
        self.now = 0

    @initialize(name=st.sampled_from(sorted(RANKS)))
    def start(self, name: str) -> None:
        self.tree = RadixTree(BLOCK, make_eviction(name))
        self.rank = RANKS[name]

    # --- the model ---

    def locked(self, path: Path) -> bool:
        return any(held.path[0] == path[0] and held.path[1][: len(path[1])] == path[1] for held in self.held)

    def below(self, path: Path) -> list[Path]:
        """What lies under a block, at any distance."""
        size = len(path[1])
        return [p for p in self.model if p[0] == path[0] and len(p[1]) > size and p[1][:size] == path[1]]

    def cached(self, start: Path, run: Run) -> list[Path]:
        """The paths of the leading blocks of `run` after `start` that the model has."""
        found: list[Path] = []
        for length in range(1, len(run) + 1):
            path = (start[0], start[1] + run[:length])
            if path not in self.model:
                break
            found.append(path)
        return found

    def is_device_leaf(self, path: Path) -> bool:
        return not (
            self.model[path].on_host or self.locked(path) or any(not self.model[p].on_host for p in self.below(path))
        )

    def next_device_leaf(self) -> Path | None:
        leaves = [path for path in self.model if self.is_device_leaf(path)]
        return min(leaves, key=lambda path: self.rank(self.model[path]), default=None)

    def next_host_leaf(self) -> Path | None:
        leaves = [path for path, block in self.model.items() if block.on_host and not self.below(path)]
        return min(leaves, key=lambda path: self.rank(self.model[path]), default=None)

    def used(self, paths: list[Path]) -> None:
        for path in paths:
            self.model[path].last_used = self.now
            self.model[path].uses += 1

    def choose(self, data: st.DataObject) -> tuple[Path, Node | None, Run]:
        """Where to match or insert, at a root or after a node that is held; and what, perhaps beginning like a path."""
        start, after = (data.draw(namespaces), ()), None
        if self.held and data.draw(st.booleans()):
            held = data.draw(st.sampled_from(self.held))
            start, after = held.path, held.node
        known = [path for path in self.model if path[0] == start[0] and path[1][: len(start[1])] == start[1]]
        run: Run = ()
        if known and data.draw(st.booleans()):
            run = data.draw(st.sampled_from(known))[1][len(start[1]) :]
        return start, after, run + data.draw(runs)

    def match(self, start: Path, after: Node | None, run: Run) -> tuple[Node | None, Path, list[Node]]:
        self.now += 1
        match = self.tree.match(pack(run), start[0], after)
        paths = self.cached(start, run)
        self.used(paths)
        on_device = [path for path in paths if not self.model[path].on_host]
        assert match.blocks == [self.model[path].number for path in on_device]
        assert [number for node in match.host for number in node.blocks] == [
            self.model[path].number for path in paths[len(on_device) :]
        ]
        if not on_device:
            assert match.node is after
        return match.node, on_device[-1] if on_device else start, match.host

    # --- calls ---

    @rule(data=st.data())
    def match_only(self, data: st.DataObject) -> None:
        self.match(*self.choose(data))

    @rule(data=st.data(), odd=st.integers(0, BLOCK - 1))
    def peek(self, data: st.DataObject, odd: int) -> None:
        def picture() -> list[tuple[object, ...]]:
            return [(n.key, tuple(n.blocks), n.last_used, n.uses, id(n)) for n in self.tree.nodes()]

        before = picture()
        (namespace, run), _, tail = self.choose(data)
        run += tail
        paths = self.cached((namespace, ()), run)
        on_host = sum(self.model[path].on_host for path in paths)
        tokens = pack(run) + pack_ints([0] * odd)  # a last block that is not full is never cached
        assert self.tree.peek(tokens, namespace) == (len(paths) - on_host, on_host)
        assert picture() == before

    @rule(data=st.data(), lock=st.booleans())
    def insert(self, data: st.DataObject, lock: bool) -> None:
        start, after, run = self.choose(data)
        run = run[: len(self.free)]
        blocks = [self.free.pop() for _ in run]
        tail = data.draw(st.integers(0, BLOCK - 1))  # tokens of a block that is not full: ignored
        inserted = self.tree.insert(pack(run) + pack_ints([1] * tail), blocks, start[0], after)
        if not run:
            assert inserted == (after, [], [])
            return
        self.now += 1
        present = self.cached(start, run)
        self.used(present)
        taken, freed_host = [], []
        for index, number in enumerate(blocks):
            path = (start[0], start[1] + run[: index + 1])
            known = self.model.get(path)
            if known is None:
                self.model[path] = Block(number, False, self.now, 1, self.now)
            elif known.on_host:
                freed_host.append(known.number)
                known.number, known.on_host, known.created, known.plan_after = number, False, self.now, -1
            else:
                self.free.append(number)
                continue
            taken.append(number)
        assert inserted.taken == taken
        assert inserted.freed_host == freed_host
        self.free_host += freed_host
        assert inserted.node is not None
        if lock:
            self.tree.lock(inserted.node)
            self.held.append(Held(inserted.node, (start[0], start[1] + run)))

    @rule(data=st.data())
    def match_and_lock(self, data: st.DataObject) -> None:
        node, path, _ = self.match(*self.choose(data))
        if node is not None:
            self.tree.lock(node)
            self.held.append(Held(node, path))

    def unlock_one(self, data: st.DataObject) -> Held:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.now += 1
        self.tree.unlock(held.node)
        for length in range(1, len(held.path[1]) + 1):
            path = (held.path[0], held.path[1][:length])
            if not self.locked(path):
                self.model[path].last_used = self.now
        return held

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.unlock_one(data)

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        freed, freed_host = set(), set()
        while len(freed) < count and (path := self.next_device_leaf()) is not None:
            freed_host |= {self.model.pop(p).number for p in self.below(path)}
            freed.add(self.model.pop(path).number)
        got, got_host = self.tree.evict(count)
        assert len(got) == len(freed)
        assert set(got) == freed
        assert len(got_host) == len(freed_host)
        assert set(got_host) == freed_host
        self.free += got
        self.free_host += got_host

    @rule(count=st.integers(0, 8))
    def evict_host(self, count: int) -> None:
        freed = set()
        while len(freed) < count and (path := self.next_host_leaf()) is not None:
            freed.add(self.model.pop(path).number)
        got = self.tree.evict_host(count)
        assert len(got) == len(freed)
        assert set(got) == freed
        self.free_host += got

    def demoted(self, pairs: list[tuple[int, int]], moved: list[Path], offered: list[int]) -> None:
        """Check what a demotion says, and book it."""
        assert len(pairs) == len(moved)
        host_of = dict(pairs)
        assert set(host_of) == {self.model[path].number for path in moved}
        assert {host for _, host in pairs} == set(offered[: len(pairs)])
        for path in moved:
            block = self.model[path]
            self.free.append(block.number)
            block.number = host_of[block.number]
        self.free_host += offered[len(pairs) :]

    @rule(count=st.integers(0, 8))
    def demote(self, count: int) -> None:
        offered = [self.free_host.pop() for _ in range(min(count, len(self.free_host)))]
        moved: list[Path] = []
        while len(moved) < len(offered) and (path := self.next_device_leaf()) is not None:
            self.model[path].on_host = True
            moved.append(path)
        self.demoted(self.tree.demote(offered), moved, offered)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, 8))
    def swap_out(self, data: st.DataObject, count: int) -> None:
        held = self.unlock_one(data)
        offered = [self.free_host.pop() for _ in range(min(count, len(self.free_host)))]
        moved: list[Path] = []
        for length in range(len(held.path[1]), 0, -1):
            path = (held.path[0], held.path[1][:length])
            if len(moved) == len(offered) or not self.is_device_leaf(path):
                break
            self.model[path].on_host = True
            moved.append(path)
        self.demoted(self.tree.demote_path(held.node, offered), moved, offered)

    @precondition(lambda self: any(block.on_host for block in self.model.values()))
    @rule(data=st.data(), plan=st.integers(0, 99))
    def promote(self, data: st.DataObject, plan: int) -> None:
        namespace, run = data.draw(st.sampled_from([path for path, block in self.model.items() if block.on_host]))
        host = self.match((namespace, ()), None, run + data.draw(runs))[2]
        nodes = host[: data.draw(st.integers(0, len(host)))]
        while sum(len(node.blocks) for node in nodes) > len(self.free):
            nodes.pop()
        blocks = [self.free.pop() for node in nodes for _ in node.blocks]
        numbers = [number for node in nodes for number in node.blocks]
        self.now += 1
        assert self.tree.promote(nodes, blocks) == list(zip(numbers, blocks, strict=True))
        by_number = {block.number: block for block in self.model.values() if block.on_host}
        for number, fresh in zip(numbers, blocks, strict=True):
            block = by_number[number]
            block.number, block.on_host, block.created, block.plan_after = fresh, False, self.now, plan
        for node in nodes:
            node.plan_after = plan
        self.free_host += numbers

    @precondition(lambda self: len(self.model) > NUM_DEVICE // 2)
    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.free = list(range(NUM_DEVICE))
        self.free_host = list(range(100, 100 + NUM_HOST))
        self.model.clear()
        self.held.clear()

    # --- what must hold ---

    @invariant()
    def tree_is_the_model(self) -> None:
        if not hasattr(self, "tree"):
            return
        seen: dict[Path, Block] = {}
        for name, root in self.tree._roots.items():
            assert root.children, "the root of an empty namespace stayed"
            self.look(root, (name.decode(), ()), seen)
        assert seen == self.model

    def look(self, node: Node, path: Path, seen: dict[Path, Block]) -> None:
        """Add all blocks below `node`, which ends at `path`, to `seen`."""
        assert node.device_children == sum(not child.on_host for child in node.children.values())
        assert node.locks == sum(held.node is node for held in self.held) + sum(
            child.locks > 0 for child in node.children.values()
        )
        for first, child in node.children.items():
            assert child.parent is node
            assert child.blocks
            assert len(child.key) == len(child.blocks) * BLOCK * 4
            assert child.key[: BLOCK * 4] == first
            assert child.on_host or not node.on_host
            tokens = memoryview(child.key).cast("i").tolist()
            end = path
            for index, number in enumerate(child.blocks):
                end = (path[0], (*end[1], tuple(tokens[index * BLOCK : (index + 1) * BLOCK])))
                seen[end] = Block(number, child.on_host, child.last_used, child.uses, child.created, child.plan_after)
                assert self.locked(end) == (child.locks > 0)
            self.look(child, end, seen)

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "tree"):
            return
        on_device = [block.number for block in self.model.values() if not block.on_host]
        on_host = [block.number for block in self.model.values() if block.on_host]
        assert sorted(on_device + self.free) == list(range(NUM_DEVICE))
        assert sorted(on_host + self.free_host) == list(range(100, 100 + NUM_HOST))
        assert self.tree.num_blocks == len(on_device)
        assert self.tree.num_host_blocks == len(on_host)
        assert self.tree.num_locked_blocks == sum(self.locked(path) for path in self.model)
        assert self.tree.num_evictable == self.tree.num_blocks - self.tree.num_locked_blocks

    @invariant()
    def holders_end_where_they_did(self) -> None:
        for held in self.held:
            key = b""
            node = held.node
            while node.parent is not None:
                key = node.key + key
                node = node.parent
            assert key == pack(held.path[1])


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def tree_of(name: str = "lru") -> RadixTree:
    return RadixTree(BLOCK, make_eviction(name))


def test_the_least_recently_used_goes_first_and_from_its_tail() -> None:
    tree = tree_of()
    tree.insert(pack_ints([1, 1, 2, 2, 3, 3]), [10, 11, 12])
    tree.insert(pack_ints([5, 5]), [20])
    tree.insert(pack_ints([1, 1, 9, 9]), [30, 31])
    assert tree.match(pack_ints([5, 5])).blocks == [20]
    assert tree.evict(1) == ([12], [])
    assert tree.evict(2) == ([11, 31], [])
    assert tree.evict(9) == ([10, 20], [])


def test_the_least_often_used_goes_first_and_what_was_popular_stays() -> None:
    tree = tree_of("lfu")
    tree.insert(pack_ints([1, 1]), [1])
    for _ in range(3):
        tree.match(pack_ints([1, 1]))
    tree.insert(pack_ints([2, 2]), [2])
    tree.insert(pack_ints([3, 3]), [3])
    tree.match(pack_ints([2, 2]))
    assert [tree.evict(1)[0] for _ in range(3)] == [[3], [2], [1]]


def test_first_in_first_out_does_not_care_for_use() -> None:
    tree = tree_of("fifo")
    for token in (3, 1, 2):
        tree.insert(pack_ints([token, token]), [token])
    tree.match(pack_ints([3, 3]))
    assert tree.evict(2) == ([3, 1], [])


def test_an_unknown_eviction_policy_is_named() -> None:
    with pytest.raises(ValueError, match="'random' is not one of lru, lfu, fifo"):
        make_eviction("random")


def test_a_cut_takes_the_host_continuation_with_it() -> None:
    tree = tree_of()
    tree.insert(pack_ints([1, 1, 2, 2, 3, 3, 4, 4]), [0, 1, 2, 3])
    assert sorted(tree.demote([50, 51])) == [(2, 50), (3, 51)]
    assert tree.num_host_blocks == 2
    freed, freed_host = tree.evict(1)
    assert (freed, sorted(freed_host)) == ([1], [50, 51])
    assert tree.peek(pack_ints([1, 1, 2, 2])) == (1, 0)
    assert (tree.num_blocks, tree.num_host_blocks) == (1, 0)


def test_inserting_over_part_of_a_host_node_leaves_the_rest_on_the_host() -> None:
    tree = tree_of()
    node = tree.insert(pack_ints([1, 1, 2, 2, 3, 3]), [0, 1, 2]).node
    assert node is not None
    node.plan_after = 7
    assert sorted(tree.demote([50, 51, 52])) == [(0, 50), (1, 51), (2, 52)]
    inserted = tree.insert(pack_ints([1, 1, 2, 2, 9, 9]), [5, 6, 7])
    assert inserted.taken == [5, 6, 7]
    assert inserted.freed_host == [50, 51]
    match = tree.match(pack_ints([1, 1, 2, 2, 3, 3]))
    assert match.blocks == [5, 6]
    assert match.node is not None
    assert match.node.plan_after == -1, "no copy fills blocks that were computed"
    assert [(node.blocks, node.plan_after) for node in match.host] == [([52], 7)]


def test_a_split_of_a_locked_node_keeps_both_parts() -> None:
    tree = tree_of()
    held = tree.insert(pack_ints([1, 1, 2, 2]), [0, 1]).node
    assert held is not None
    held.plan_after = 7
    tree.lock(held)
    upper = tree.match(pack_ints([1, 1, 3, 3])).node
    assert upper is not None
    assert upper is not held
    assert held.parent is upper
    assert upper.plan_after == held.plan_after == 7
    assert tree.evict(9) == ([], [])
    assert tree.demote([50]) == []
    assert tree.num_locked_blocks == 2
    tree.unlock(held)
    assert sorted(tree.evict(9)[0]) == [0, 1]


def test_misuse_is_refused() -> None:
    tree = tree_of()
    node = tree.insert(pack_ints([1, 1]), [0]).node
    assert node is not None
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(node)
    with pytest.raises(ValueError, match="only 1 tokens"):
        tree.insert(pack_ints([2]), [1])
    tree.demote([50])
    with pytest.raises(ValueError, match="host tier"):
        tree.lock(node)
    with pytest.raises(ValueError, match="host tier"):
        tree.insert(pack_ints([2, 2]), [1], after=node)
    with pytest.raises(ValueError, match="2 for nodes of 1 blocks"):
        tree.promote([node], [1, 2])
    tree.promote([node], [1])
    with pytest.raises(ValueError, match="chain of host nodes"):
        tree.promote([node], [2])
    assert (tree.num_blocks, tree.num_host_blocks) == (1, 0)


def test_a_long_node_given_up_block_by_block_keeps_its_prefix() -> None:
    tree = tree_of()
    tokens = list(range(2000))
    tree.insert(pack_ints(tokens), list(range(1000)))
    for left in range(999, -1, -1):
        assert tree.evict(1) == ([left], [])
        assert tree.peek(pack_ints(tokens)) == (left, 0)
    assert list(tree.nodes()) == []


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_eviction_queues_do_not_grow_with_nodes_that_are_gone(recomputed: bool) -> None:
    """Nodes that one tier's queue still knows go away in the other tier, and nothing is ever popped from the first."""
    tree = tree_of()
    tokens = pack_ints([1, 1, 2, 2])
    for _ in range(1000):
        node = tree.insert(tokens, [0, 1]).node
        assert node is not None
        assert len(tree.demote_path(node, [50, 51])) == 2
        if recomputed:
            assert tree.insert(tokens, [0, 1]).freed_host == [50, 51]
            assert tree.evict(2)[0] == [0, 1]
        else:
            assert tree.evict_host(2) == [50, 51]
    assert list(tree.nodes()) == []
    assert len(tree._device_leaves) + len(tree._host_leaves) < 100


def test_the_eviction_queue_has_one_entry_for_a_node_however_often_it_is_used() -> None:
    tree = tree_of()
    node = tree.insert(pack_ints([1, 1]), [0]).node
    assert node is not None
    for _ in range(100):
        tree.lock(node)
        tree.match(pack_ints([1, 1]))
        tree.unlock(node)
    assert len(tree._device_leaves) == 1
