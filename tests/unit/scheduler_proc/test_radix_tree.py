"""The radix tree against a plain list of everything that was inserted."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.codec import pack_ints
from scheduler_proc.radix_tree import Node, RadixTree

BLOCK = 2
sequences = st.lists(st.integers(0, 2), min_size=0, max_size=16)


def longest_common(tokens: list[int], stored: list[list[int]]) -> int:
    """Length in whole blocks of the longest prefix of `tokens` that starts some stored sequence."""
    best = 0
    for other in stored:
        blocks = 0
        while True:
            end = (blocks + 1) * BLOCK
            if end > min(len(tokens), len(other)) or tokens[:end] != other[:end]:
                break
            blocks += 1
        best = max(best, blocks)
    return best


@settings(max_examples=300, deadline=None)
@given(st.lists(sequences, max_size=12), sequences)
def test_match_finds_the_longest_stored_prefix(stored: list[list[int]], wanted: list[int]) -> None:
    tree = RadixTree(BLOCK)
    next_block = 0
    owner: dict[int, list[int]] = {}  # block id -> the tokens from the root to its end
    for tokens in stored:
        blocks = list(range(next_block, next_block + len(tokens) // BLOCK))
        next_block += len(blocks)
        _, taken = tree.insert(pack_ints(tokens), blocks)
        for index, block in enumerate(blocks):
            if block in taken:
                owner[block] = tokens[: (index + 1) * BLOCK]
    blocks, node = tree.match(pack_ints(wanted))
    assert len(blocks) == longest_common(wanted, stored)
    assert (node is None) == (not blocks)
    for index, block in enumerate(blocks):
        assert owner[block] == wanted[: (index + 1) * BLOCK]
    assert tree.num_blocks == len(owner)


@settings(max_examples=300, deadline=None)
@given(st.lists(sequences, max_size=10), st.lists(sequences, max_size=4), st.integers(0, 40))
def test_eviction_spares_what_is_locked_and_takes_all_else(
    stored: list[list[int]], held: list[list[int]], count: int
) -> None:
    tree = RadixTree(BLOCK)
    next_block = 0
    for tokens in stored:
        blocks = list(range(next_block, next_block + len(tokens) // BLOCK))
        next_block += len(blocks)
        tree.insert(pack_ints(tokens), blocks)
    locked: set[int] = set()
    nodes: list[Node] = []
    for tokens in held:
        blocks, node = tree.match(pack_ints(tokens))
        if node is not None:
            tree.lock(node)
            nodes.append(node)
            locked.update(blocks)
    before, evictable = tree.num_blocks, tree.num_evictable
    assert evictable == before - len(locked)
    freed = tree.evict(count)
    assert len(freed) == min(count, evictable)
    assert len(set(freed)) == len(freed)
    assert not locked & set(freed)
    assert tree.num_blocks == before - len(freed)
    for tokens in held:
        blocks, _ = tree.match(pack_ints(tokens))
        assert locked.issuperset(blocks)
    for node in nodes:
        tree.unlock(node)
    assert len(tree.evict(1000)) == before - len(freed)
    assert tree.num_blocks == 0
    assert list(tree.nodes()) == []


def test_the_least_recently_used_goes_first_and_from_its_tail() -> None:
    tree = RadixTree(BLOCK)
    tree.insert(pack_ints([1, 1, 2, 2, 3, 3]), [10, 11, 12])
    tree.insert(pack_ints([5, 5]), [20])
    tree.insert(pack_ints([1, 1, 9, 9]), [30, 31])
    assert tree.match(pack_ints([5, 5]))[0] == [20]
    assert tree.evict(1) == [12]
    assert tree.evict(2) == [11, 31]
    assert tree.evict(9) == [10, 20]


def test_the_eviction_queue_does_not_grow_with_use() -> None:
    tree = RadixTree(BLOCK)
    tree.insert(pack_ints([1, 1, 2, 2]), [0, 1])
    for _ in range(1000):
        _, node = tree.match(pack_ints([1, 1, 2, 2]))
        assert node is not None
        tree.lock(node)
        tree.unlock(node)
    assert len(tree._queue) <= 2
