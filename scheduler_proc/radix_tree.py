"""The prefix cache: a radix tree over token ids whose edges are whole blocks.

A node holds a run of full blocks: their token ids as int32 bytes (real ids are compared, never a hash; no Python object
per token) and their block ids. Two children of a node differ in their first block. The tree touches no memory: it owns
block ids, says which ones a prompt can reuse, and gives ids back when told to evict.

Matching is separate from locking. A locked node and its ancestors are in use by a request and are never evicted.
"""

import heapq
from collections.abc import Iterator


class Node:
    """A run of full blocks below its parent."""

    __slots__ = ("blocks", "children", "key", "last_used", "locks", "parent", "queued")

    def __init__(self, key: bytes, blocks: list[int], parent: "Node | None", last_used: int) -> None:
        self.key = key  # int32 token ids, len(blocks) * block_size of them
        self.blocks = blocks
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0  # requests that hold this node or one below it
        self.last_used = last_used
        self.queued = False  # in the eviction queue, perhaps with an outdated time


class RadixTree:
    """Longest-prefix matching over block-aligned token runs, with least-recently-used eviction.

    Time is a counter of operations, so the order of eviction depends on nothing but the calls.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block_bytes = block_size * 4
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._queue: list[tuple[int, int, Node]] = []  # heap: last used, serial, node; at most one entry a node
        self._serial = 0
        self.num_blocks = 0
        self.num_locked_blocks = 0

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` could give back."""
        return self.num_blocks - self.num_locked_blocks

    def match(self, tokens: bytes, namespace: str = "") -> tuple[list[int], Node | None]:
        """Block ids of the longest cached prefix of `tokens` (int32), and the node where it ends.

        The node is the one to `lock`; a match that ends inside a node splits it there. No prefix: ([], None).
        """
        self._clock += 1
        node = self._roots.get(namespace)
        if node is None:
            return [], None
        blocks: list[int] = []
        offset = 0
        step = self._block_bytes
        while child := node.children.get(tokens[offset : offset + step]):
            common = self._common_blocks(child.key, tokens, offset)
            if common < len(child.blocks):
                child = self._split(child, common)
            node = child
            node.last_used = self._clock
            blocks += node.blocks
            offset += len(node.key)
        return blocks, node if blocks else None

    def _common_blocks(self, key: bytes, tokens: bytes, offset: int) -> int:
        """How many leading blocks of `key` stand in `tokens` at `offset`; at least the first is known to."""
        step = self._block_bytes
        if tokens.startswith(key, offset):
            return len(key) // step
        low, high = 1, min(len(key), len(tokens) - offset) // step  # the first `low` blocks are equal
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(key[low * step : middle * step], offset + low * step):
                low = middle
            else:
                high = middle - 1
        return low

    def insert(self, tokens: bytes, blocks: list[int], namespace: str = "") -> tuple[Node | None, list[int]]:
        """Give the tree the full blocks of `tokens`; returns the node they end in and the block ids it took.

        `blocks[i]` holds tokens i * block_size and on. Where the tree already has a block for a position it keeps its
        own, and the caller's stays the caller's.
        """
        self._clock += 1
        step = self._block_bytes
        tokens = tokens[: len(blocks) * step]
        if len(tokens) != len(blocks) * step:
            raise ValueError(f"{len(blocks)} blocks, but {len(tokens) // 4} tokens")
        if not blocks:
            return None, []
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(b"", [], None, self._clock)
        offset = 0
        while offset < len(tokens) and (child := node.children.get(tokens[offset : offset + step])):
            common = self._common_blocks(child.key, tokens, offset)
            if common < len(child.blocks):
                child = self._split(child, common)
            node = child
            node.last_used = self._clock
            offset += len(node.key)
        if offset == len(tokens):
            self._offer(node)
            return node, []
        taken = blocks[offset // step :]
        leaf = Node(tokens[offset:], taken, node, self._clock)
        node.children[leaf.key[:step]] = leaf
        self.num_blocks += len(taken)
        self._offer(leaf)
        return leaf, taken

    def _split(self, node: Node, blocks: int) -> Node:
        """Cut `node` after so many blocks; returns the upper part, a new node (locks below hold both parts)."""
        cut = blocks * self._block_bytes
        parent = node.parent
        assert parent is not None
        upper = Node(node.key[:cut], node.blocks[:blocks], parent, node.last_used)
        upper.locks = node.locks
        parent.children[upper.key[: self._block_bytes]] = upper
        node.key = node.key[cut:]
        node.blocks = node.blocks[blocks:]
        node.parent = upper
        upper.children[node.key[: self._block_bytes]] = node
        return upper

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors from eviction."""
        current: Node | None = node
        while current is not None:
            if current.locks == 0:
                self.num_locked_blocks += len(current.blocks)
            current.locks += 1
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        current: Node | None = node
        while current is not None:
            if current.locks <= 0:
                raise ValueError("unlock of a node that is not locked")
            current.locks -= 1
            if current.locks == 0:
                self.num_locked_blocks -= len(current.blocks)
                self._offer(current)
            current = current.parent

    def _offer(self, node: Node) -> None:
        """Put a leaf that nobody holds into the eviction queue."""
        if node.locks == 0 and not node.children and node.parent is not None and not node.queued:
            self._serial += 1
            node.queued = True
            heapq.heappush(self._queue, (node.last_used, self._serial, node))

    def evict(self, count: int) -> list[int]:
        """Give back `count` block ids, or as many as nobody holds: the tails of the longest unused leaves."""
        freed: list[int] = []
        while len(freed) < count and self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.locks or node.children:
                continue  # locked or extended since; it is offered again when that ends
            if node.last_used != last_used:
                self._offer(node)
                continue
            wanted = min(count - len(freed), len(node.blocks))
            freed += node.blocks[len(node.blocks) - wanted :]
            self.num_blocks -= wanted
            if wanted < len(node.blocks):
                del node.blocks[len(node.blocks) - wanted :]
                node.key = node.key[: len(node.blocks) * self._block_bytes]
                self._offer(node)
            else:
                parent = node.parent
                assert parent is not None
                del parent.children[node.key[: self._block_bytes]]
                node.blocks = []
                self._offer(parent)
                if parent.parent is None and not parent.children:
                    self._roots = {name: root for name, root in self._roots.items() if root is not parent}
        return freed

    def nodes(self) -> Iterator[Node]:
        """All nodes that hold blocks, for the invariant checks."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())
