"""Prefixes that requests asked to keep in the cache for some time."""

import math

from scheduler_proc.radix_tree import Node, RadixTree


class Pins:
    """Locks on tree nodes that expire. At most `max_blocks` are held; what would exceed that is not pinned."""

    def __init__(self, tree: RadixTree, max_blocks: int) -> None:
        self._tree = tree
        self._max_blocks = max_blocks
        self._pins: dict[Node, float] = {}  # when it expires
        self.next_expiry = math.inf  # when to call `expire` at the latest
        self.num_blocks = 0  # held by pins, each block counted once

    def pin(self, node: Node, until: float) -> bool:
        """Keep `node` and what is before it until then; False when that would be too much."""
        known = self._pins.get(node)
        if known is None:
            if self.num_blocks + _unpinned_blocks(node) > self._max_blocks:
                return False
            self._tree.lock(node)
            self._count(node)
        else:
            until = max(until, known)
        self._pins[node] = until
        self.next_expiry = min(self.next_expiry, until)
        return True

    def expire(self, now: float) -> None:
        """Let go of what has been kept long enough."""
        if now >= self.next_expiry:
            for node in [node for node, until in self._pins.items() if until <= now]:
                self._release(node)
            self.next_expiry = min(self._pins.values(), default=math.inf)

    def release_first(self) -> bool:
        """Let go of the pin that would expire first; False when there is none."""
        if not self._pins:
            return False
        self._release(min(self._pins, key=self._pins.__getitem__))
        return True

    def _count(self, node: Node) -> None:
        current: Node | None = node
        while current is not None:
            current.pins += 1
            if current.pins > 1:
                break  # its ancestors are counted already
            self.num_blocks += len(current.blocks)
            current = current.parent

    def _release(self, node: Node) -> None:
        del self._pins[node]
        current: Node | None = node
        while current is not None:
            current.pins -= 1
            if current.pins > 0:
                break
            self.num_blocks -= len(current.blocks)
            current = current.parent
        self._tree.unlock(node)

    def reset(self) -> None:
        """The tree has been emptied, locks and all."""
        self._pins.clear()
        self.next_expiry = math.inf
        self.num_blocks = 0

    def nodes(self) -> list[Node]:
        """The pinned nodes, for the invariant checks."""
        return list(self._pins)


def _unpinned_blocks(node: Node) -> int:
    """Blocks of `node` and its ancestors that no pin holds yet."""
    count = 0
    current: Node | None = node
    while current is not None and not current.pins:
        count += len(current.blocks)
        current = current.parent
    return count
