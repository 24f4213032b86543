"""The prefix cache: a radix tree over token ids whose edges are whole blocks, on two tiers.

A node holds a run of full blocks: their token ids as int32 bytes (real ids are compared, never a hash; no Python object
per token) and their block ids, of the KV pool on the device or of the host pool. Two children of a node differ in their
first block. From the root down a path has device nodes first, then host nodes. The tree touches no memory: it owns
block ids, says which ones a prompt can reuse, and gives ids back when told to evict.

Matching is separate from locking. A locked node and its ancestors are in use by a request; they stay on the device.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scheduler_proc.eviction import Eviction, EvictionQueue

# Cutting a node copies its key. Below this many blocks that is cheaper than cutting it in halves first.
_SHORT_NODE = 64


class Node:
    """A run of full blocks below its parent. A root has no blocks, and its namespace as key."""

    __slots__ = (
        "blocks",
        "children",
        "created",
        "device_children",
        "key",
        "last_used",
        "locks",
        "on_host",
        "parent",
        "pins",
        "plan_after",
        "uses",
    )

    def __init__(self, key: bytes, blocks: list[int], parent: "Node | None", now: int) -> None:
        self.key = key  # int32 token ids, len(blocks) * block_size of them
        self.blocks = blocks  # ids in the KV pool, or in the host pool when `on_host`
        self.on_host = False
        self.parent = parent  # None: a root, or no longer in the tree
        self.children: dict[bytes, Node] = {}  # by their first block
        self.device_children = 0  # how many of the children are on the device
        self.locks = 0  # `lock` calls on this very node, plus its locked children
        self.pins = 0  # likewise those of the locks that are pins; `pins` counts them
        self.last_used = now  # all times are the tree's counter of operations
        self.uses = 1
        self.created = now  # when its blocks came onto the device
        self.plan_after = -1  # the step whose copies fill this node; set by the KV manager


class Match(NamedTuple):
    """A cached prefix. Valid until the tree changes: evicting can cut and drop what is not locked."""

    blocks: list[int]  # of the KV pool
    node: Node | None  # where those end, the one to lock; `after` when there are none
    host: list[Node]  # how it goes on in the host tier, top down


class Inserted(NamedTuple):
    node: Node | None  # where the inserted blocks end; `after` when there were none
    taken: list[int]  # the caller's blocks that are now the tree's
    freed_host: list[int]  # host blocks that these made superfluous


class RadixTree:
    """Longest-prefix matching over block-aligned token runs, with a pluggable order of eviction.

    Time is a counter of operations, so the order of eviction depends on nothing but the calls.
    """

    def __init__(self, block_size: int, eviction: Eviction) -> None:
        self.block_size = block_size
        self._block_bytes = block_size * 4
        self._roots: dict[bytes, Node] = {}
        self._clock = 0
        self._device_leaves = EvictionQueue(eviction, _is_device_leaf)
        self._host_leaves = EvictionQueue(eviction, _is_host_leaf)
        self.num_blocks = 0  # on the device, like the next
        self.num_locked_blocks = 0
        self.num_host_blocks = 0
        self.num_clears = 0  # nodes from before the last `clear` are void

    @property
    def clock(self) -> int:
        """The counter of operations that nodes take their times from."""
        return self._clock

    @property
    def num_evictable(self) -> int:
        """Device blocks that `evict` could give back."""
        return self.num_blocks - self.num_locked_blocks

    def roots(self) -> list[Node]:
        """One for each namespace."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """All nodes that hold blocks, for the invariant checks."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    # --- finding and adding ---

    def match(self, tokens: bytes, namespace: str = "", after: Node | None = None) -> Match:
        """The longest cached prefix of `tokens` (int32), which follow `after`, a device node, or start at the root.

        Counts as a use. A match that ends inside a node splits it there. Time is linear in the length of the match.
        """
        self._clock += 1
        clock = self._clock
        node = self._roots.get(namespace.encode()) if after is None else after
        last, blocks, host = after, list[int](), list[Node]()
        if node is None:
            return Match(blocks, last, host)
        step = self._block_bytes
        offset = 0
        while (child := node.children.get(tokens[offset : offset + step])) is not None:
            key = child.key
            # The lookup has compared the first block. No call for nodes of one block: a path can have a thousand.
            if len(key) > step and not tokens.startswith(key, offset):
                child = self._split(child, self._common_blocks(key, tokens, offset))
                key = child.key
            node = child
            node.last_used = clock
            node.uses += 1
            offset += len(key)
            if node.on_host:
                host.append(node)
            else:
                blocks += node.blocks
                last = node
        return Match(blocks, last, host)

    def peek(self, tokens: bytes, namespace: str = "") -> tuple[int, int]:
        """How many leading blocks of `tokens` (int32) are cached on the device and after them on the host.

        Changes nothing and is no use.
        """
        node = self._roots.get(namespace.encode())
        device = host = offset = 0
        step = self._block_bytes
        while node is not None and (node := node.children.get(tokens[offset : offset + step])) is not None:
            key = node.key
            common = len(node.blocks)
            if common > 1 and not tokens.startswith(key, offset):
                common = self._common_blocks(key, tokens, offset)
            if node.on_host:
                host += common
            else:
                device += common
            if common < len(node.blocks):
                break
            offset += len(key)
        return device, host

    def insert(self, tokens: bytes, blocks: Sequence[int], namespace: str = "", after: Node | None = None) -> Inserted:
        """Give the tree whole blocks that follow `after`, a device node, or start at the root.

        `blocks[i]` holds the tokens (int32) i * block_size and on. Where the tree already has a device block it keeps
        its own, and the caller's stays the caller's; a host block it gives up for the caller's. ValueError for fewer
        tokens than the blocks hold, or an `after` in the host tier.
        """
        if after is not None and after.on_host:
            raise ValueError("after: a node in the host tier cannot have blocks on the device below it")
        step = self._block_bytes
        tokens = tokens[: len(blocks) * step]
        if len(tokens) != len(blocks) * step:
            raise ValueError(f"tokens: {len(blocks)} blocks, but only {len(tokens) // 4} tokens")
        taken, freed_host = list[int](), list[int]()
        if not blocks:
            return Inserted(after, taken, freed_host)
        self._clock += 1
        node = self._root(namespace) if after is None else after
        offset = 0
        while (child := node.children.get(tokens[offset : offset + step])) is not None:
            if len(child.key) > step and not tokens.startswith(child.key, offset):
                child = self._split(child, self._common_blocks(child.key, tokens, offset))
            node = child
            node.last_used = self._clock
            node.uses += 1
            if node.on_host:
                replacing = blocks[offset // step : (offset + len(node.key)) // step]
                taken += replacing
                freed_host += node.blocks
                self._to_device(node, replacing)
                node.plan_after = -1
            offset += len(node.key)
        if offset < len(tokens):
            leaf = Node(tokens[offset:], list(blocks[offset // step :]), node, self._clock)
            node.children[leaf.key[:step]] = leaf
            node.device_children += 1
            taken += leaf.blocks
            self.num_blocks += len(leaf.blocks)
            node = leaf
        self._device_leaves.offer(node)
        return Inserted(node, taken, freed_host)

    def _root(self, namespace: str) -> Node:
        key = namespace.encode()
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(key, [], None, self._clock)
        return root

    def _common_blocks(self, key: bytes, tokens: bytes, offset: int) -> int:
        """How many leading blocks of `key` stand in `tokens` at `offset`: at least the first, and not all of them."""
        step = self._block_bytes
        low, high = 1, min(len(key), len(tokens) - offset) // step  # the first `low` blocks are equal
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(key[low * step : middle * step], offset + low * step):
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, blocks: int) -> Node:
        """Cut `node` after so many blocks; returns the upper part, a new node. Whoever holds `node` holds both."""
        cut = blocks * self._block_bytes
        parent = node.parent
        assert parent is not None
        upper = Node(node.key[:cut], node.blocks[:blocks], parent, node.created)
        upper.on_host = node.on_host
        upper.device_children = 0 if node.on_host else 1
        upper.locks = 1 if node.locks else 0
        upper.pins = 1 if node.pins else 0
        upper.last_used = node.last_used
        upper.uses = node.uses
        upper.plan_after = node.plan_after
        parent.children[upper.key[: self._block_bytes]] = upper
        node.key = node.key[cut:]
        node.blocks = node.blocks[blocks:]
        node.parent = upper
        upper.children[node.key[: self._block_bytes]] = node
        return upper

    # --- holding ---

    def lock(self, node: Node) -> None:
        """Keep a device node and its ancestors where they are. ValueError for a host node."""
        if node.on_host:
            raise ValueError("lock of a node in the host tier")
        current: Node | None = node
        while current is not None:
            current.locks += 1
            if current.locks > 1:
                break  # it holds its ancestors already, for everything below it
            self.num_locked_blocks += len(current.blocks)
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`; what nobody holds any more was in use until now. ValueError for a node not locked."""
        if node.locks <= 0:
            raise ValueError("unlock of a node that is not locked")
        self._clock += 1
        current: Node | None = node
        while current is not None:
            current.locks -= 1
            if current.locks > 0:
                break
            self.num_locked_blocks -= len(current.blocks)
            current.last_used = self._clock
            self._device_leaves.offer(current)
            current = current.parent

    # --- giving up and moving between the tiers ---

    def evict(self, count: int) -> tuple[list[int], list[int]]:
        """Give up `count` device blocks for good, or as many as nobody holds: the tails of the first-ranked leaves.

        Returns their ids, and those of the host blocks below them, which go with them.
        """
        freed: list[int] = []
        freed_host: list[int] = []
        while len(freed) < count and (node := self._device_leaves.pop()) is not None:
            self._keep_tail(node, count - len(freed))
            freed += node.blocks
            self.num_blocks -= len(node.blocks)
            self._drop(node)
            freed_host += self._forget_host_nodes(node)
        return freed, freed_host

    def evict_host(self, count: int) -> list[int]:
        """Give up `count` host blocks, or as many as there are: the tails of the tier's first-ranked leaves."""
        freed: list[int] = []
        while len(freed) < count and (node := self._host_leaves.pop()) is not None:
            self._keep_tail(node, count - len(freed))
            freed += node.blocks
            self.num_host_blocks -= len(node.blocks)
            self._drop(node)
        return freed

    def demote(self, host_blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Move the device blocks that `evict` would give up to these host blocks instead.

        Returns what is to be copied, (device id, host id); fewer pairs than `host_blocks` when no more are evictable.
        """
        pairs: list[tuple[int, int]] = []
        while len(pairs) < len(host_blocks) and (node := self._device_leaves.pop()) is not None:
            pairs += self._to_host(node, host_blocks, len(pairs))
        return pairs

    def demote_path(self, node: Node, host_blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Move `node`, then its ancestors, to these host blocks, up to the first that is locked or has other device
        children, or as far as the blocks suffice. Returns what is to be copied, (device id, host id).
        """
        pairs: list[tuple[int, int]] = []
        current: Node | None = node
        while current is not None and _is_device_leaf(current) and len(pairs) < len(host_blocks):
            pairs += self._to_host(current, host_blocks, len(pairs))
            current = current.parent
        return pairs

    def promote(self, nodes: Sequence[Node], blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Bring host nodes onto the device: a chain, top down, as `Match.host` has it, into these device blocks.

        Returns what is to be copied, (host id, device id). ValueError when the number of blocks differs, or a node is
        not in the host tier right below a device node.
        """
        if sum(len(node.blocks) for node in nodes) != len(blocks):
            raise ValueError(f"blocks: {len(blocks)} for nodes of {sum(len(node.blocks) for node in nodes)} blocks")
        self._clock += 1
        pairs: list[tuple[int, int]] = []
        for node in nodes:
            if not node.on_host or node.parent is None or node.parent.on_host:
                raise ValueError("nodes: not a chain of host nodes below a device node")
            fresh = blocks[len(pairs) : len(pairs) + len(node.blocks)]
            pairs += zip(node.blocks, fresh, strict=True)
            self._to_device(node, fresh)
            self._device_leaves.offer(node)
        return pairs

    def clear(self) -> None:
        """Forget everything, the locks as well: nodes from before must not be used again."""
        self._roots.clear()
        self._device_leaves.clear()
        self._host_leaves.clear()
        self.num_blocks = self.num_locked_blocks = self.num_host_blocks = 0
        self.num_clears += 1

    def _keep_tail(self, node: Node, count: int) -> None:
        """Split `node` until it is the last `count` blocks of itself, or shorter.

        By halves: cutting single blocks off a long node copies its key log times in all, and not once for each block.
        """
        while (length := len(node.blocks)) > count:
            self._split(node, length - count if length <= _SHORT_NODE else min(length // 2, length - count))

    def _to_host(self, node: Node, host_blocks: Sequence[int], used: int) -> list[tuple[int, int]]:
        """Move a device leaf, or as much of its tail as the host blocks after the first `used` have room for."""
        self._keep_tail(node, len(host_blocks) - used)
        pairs = list(zip(node.blocks, host_blocks[used : used + len(node.blocks)], strict=True))
        self.num_blocks -= len(pairs)
        self.num_host_blocks += len(pairs)
        node.blocks = [host for _, host in pairs]
        node.on_host = True
        parent = node.parent
        assert parent is not None
        parent.device_children -= 1
        self._device_leaves.discard(node)
        self._device_leaves.offer(parent)
        self._host_leaves.offer(node)
        return pairs

    def _to_device(self, node: Node, blocks: Sequence[int]) -> None:
        """Give a host node below a device node its blocks there."""
        self.num_blocks += len(blocks)
        self.num_host_blocks -= len(blocks)
        node.blocks = list(blocks)
        node.on_host = False
        node.created = self._clock
        parent = node.parent
        assert parent is not None
        parent.device_children += 1
        self._host_leaves.discard(node)

    def _drop(self, node: Node) -> None:
        """Take `node` out of the tree, and its namespace's root with the last one below it."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self._block_bytes]]
        node.parent = None
        if not node.on_host:
            parent.device_children -= 1
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.key]
        elif parent.on_host:
            self._host_leaves.offer(parent)
        else:
            self._device_leaves.offer(parent)

    def _forget_host_nodes(self, top: Node) -> list[int]:
        """Take apart what is below a node that left the tree; returns the host blocks there."""
        freed: list[int] = []
        stack = list(top.children.values())
        while stack:
            node = stack.pop()
            freed += node.blocks
            node.parent = None
            self._host_leaves.discard(node)
            stack.extend(node.children.values())
        self.num_host_blocks -= len(freed)
        return freed


def _is_device_leaf(node: Node) -> bool:
    return not (node.on_host or node.locks or node.device_children) and node.parent is not None


def _is_host_leaf(node: Node) -> bool:
    return node.on_host and not node.children and node.parent is not None
