"""Which cached blocks go first when room is needed: the plug-in point, and the queue that keeps candidates in order."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_proc.radix_tree import Node


class Eviction(ABC):
    """Ranks nodes of the radix tree. Only leaves are candidates, so a chain goes from its end whatever the ranks."""

    @abstractmethod
    def rank(self, node: "Node") -> tuple[int, ...]:
        """The smallest goes first. In the tree a rank may grow, but not shrink: see `EvictionQueue`."""


class LeastRecentlyUsed(Eviction):
    """LRU: a use is a match, an insertion, or the end of a lock."""

    def rank(self, node: "Node") -> tuple[int, ...]:
        return (node.last_used,)


class LeastFrequentlyUsed(Eviction):
    """LFU: fewest uses first, among equals the least recently used.

    A match from the root uses every node of its path, so a parent has at least the uses of each child it was matched
    with: going from the ends of chains and going by frequency agree, and a shared system prompt outlives the many
    conversations below it. Counts do not age: what was popular once stays until everything less popular is gone, and
    new blocks, with one use, compete among themselves by recency.
    """

    def rank(self, node: "Node") -> tuple[int, ...]:
        return (node.uses, node.last_used)


class FirstInFirstOut(Eviction):
    """FIFO: the oldest blocks first, used or not; a parent is older than its children and still goes after them."""

    def rank(self, node: "Node") -> tuple[int, ...]:
        return (node.created,)


_EVICTIONS: dict[str, type[Eviction]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
}


def make_eviction(name: str) -> Eviction:
    """The eviction policy of that name; ValueError for an unknown one."""
    if name not in _EVICTIONS:
        raise ValueError(f"eviction: {name!r} is not one of {', '.join(_EVICTIONS)}")
    return _EVICTIONS[name]()


class EvictionQueue:
    """Nodes by rank, kept lazily: what has become outdated since a node was offered is noticed when it comes up.

    A node has at most one valid entry. If its rank has grown since, it goes back in with the new one; if it is no
    candidate any more, it is forgotten, and its owner offers it again when it becomes one. So a use of a node costs the
    queue nothing at the time, and at most one more O(log n) later on.
    """

    def __init__(self, eviction: Eviction, is_candidate: "Callable[[Node], bool]") -> None:
        self._rank = eviction.rank
        self._is_candidate = is_candidate
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []  # rank, serial, node
        self._serials: dict[Node, int] = {}  # of each node's valid entry
        self._last_serial = 0

    def __len__(self) -> int:
        """Entries held, outdated ones included."""
        return len(self._heap)

    def offer(self, node: "Node") -> None:
        """Queue a node if it is a candidate and not queued yet."""
        if node not in self._serials and self._is_candidate(node):
            self._last_serial += 1
            self._serials[node] = self._last_serial
            heapq.heappush(self._heap, (self._rank(node), self._last_serial, node))

    def discard(self, node: "Node") -> None:
        """Forget a node that has left the tier or the tree."""
        if self._serials.pop(node, None) is not None and len(self._heap) > 2 * len(self._serials) + 64:
            self._heap = [entry for entry in self._heap if self._serials.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def pop(self) -> "Node | None":
        """Take out the candidate that ranks first; None when there is none."""
        while self._heap:
            rank, serial, node = heapq.heappop(self._heap)
            if self._serials.get(node) != serial:
                continue
            del self._serials[node]
            if not self._is_candidate(node):
                continue
            if self._rank(node) == rank:
                return node
            self.offer(node)
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._serials.clear()
