"""The KV block pool: which block ids are free. Whose the others are is told by the radix tree and the requests."""

from collections import deque
from collections.abc import Sequence


class BlockPool:
    """`total` block ids, 0 to total - 1: free, in use, or in transit.

    A block in transit has been released, but a step that is still running on the device names it: it becomes free when
    that step's result arrives, so that no later plan can hand it out while the device might still touch it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._in_transit: deque[tuple[int, Sequence[int]]] = deque()
        self.num_in_transit = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` free block ids; ValueError when there are fewer."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def release(self, blocks: Sequence[int], last_step: int | None) -> None:
        """Give blocks back: at once, or once step `last_step`, the last one that names them, has returned."""
        if not blocks:
            return
        if last_step is None:
            self._free.extend(blocks)
        else:
            self._in_transit.append((last_step, blocks))
            self.num_in_transit += len(blocks)

    def step_returned(self, step: int) -> None:
        """The device is done with `step` and all before it."""
        while self._in_transit and self._in_transit[0][0] <= step:
            blocks = self._in_transit.popleft()[1]
            self.num_in_transit -= len(blocks)
            self._free.extend(blocks)

    def free_ids(self) -> list[int]:
        """A copy of the free list, for the invariant checks."""
        return list(self._free)

    def in_transit_ids(self) -> list[int]:
        """All ids in transit, for the invariant checks."""
        return [block for _, blocks in self._in_transit for block in blocks]
