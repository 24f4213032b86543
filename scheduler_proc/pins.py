"""Prefixes that requests asked to keep in the cache for some time."""

from scheduler_proc.radix_tree import Node, RadixTree


class Pins:
    """Locks on tree nodes that expire. At most `max_blocks` are held; what would exceed that is not pinned."""

    def __init__(self, tree: RadixTree, max_blocks: int) -> None:
        self._tree = tree
        self._max_blocks = max_blocks
        self._pins: dict[Node, tuple[float, int]] = {}  # when it expires, blocks from the root
        self._next_expiry = float("inf")
        self.num_blocks = 0  # of all pins; a block of several is counted for each

    def pin(self, node: Node, num_blocks: int, until: float) -> bool:
        """Keep `node`, which ends a prefix of `num_blocks`, until then; False when that would be too much."""
        known = self._pins.get(node)
        if known is None:
            if self.num_blocks + num_blocks > self._max_blocks:
                return False
            self._tree.lock(node)
            self.num_blocks += num_blocks
        else:
            until = max(until, known[0])
        self._pins[node] = (until, num_blocks)
        self._next_expiry = min(self._next_expiry, until)
        return True

    def expire(self, now: float) -> None:
        """Let go of what has been kept long enough."""
        if now >= self._next_expiry:
            for node in [node for node, (until, _) in self._pins.items() if until <= now]:
                self._release(node)
            self._next_expiry = min((until for until, _ in self._pins.values()), default=float("inf"))

    def release_first(self) -> bool:
        """Let go of the pin that would expire first; False when there is none."""
        if not self._pins:
            return False
        self._release(min(self._pins, key=lambda node: self._pins[node][0]))
        return True

    def _release(self, node: Node) -> None:
        self.num_blocks -= self._pins.pop(node)[1]
        self._tree.unlock(node)

    def reset(self) -> None:
        """The tree has been emptied, locks and all."""
        self._pins.clear()
        self._next_expiry = float("inf")
        self.num_blocks = 0

    def nodes(self) -> list[Node]:
        """The pinned nodes, for the invariant checks."""
        return list(self._pins)
