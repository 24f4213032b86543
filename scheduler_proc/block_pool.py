"""A pool of block ids, of the KV cache or of the host tier: which are free. Whose the others are, their owners know."""

from collections.abc import Sequence


class BlockPool:
    """`total` block ids, 0 to total - 1: free, in use, or in transit.

    Steps run in the order of their plans, so a released block can be in the very next plan. Not so while a copy between
    the tiers reads or writes it: copies of a plan run beside its forward, and are complete only when the next plan's
    work begins. Until that plan is being made such a block is in transit.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.reset()

    def reset(self) -> None:
        """All blocks are free, as at the start; plans may be numbered anew."""
        self._free = list(range(self.total - 1, -1, -1))
        self._in_transit: list[tuple[int, Sequence[int]]] = []  # the plan that copies them, block ids
        self._plan = -1
        self.num_in_transit = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` free block ids; ValueError when there are fewer."""
        if count > len(self._free):
            raise ValueError(f"count: {count} blocks wanted, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def release(self, blocks: Sequence[int], until_plan: int | None) -> None:
        """Give blocks back: at once, or after plan `until_plan`, which still copies from or to them."""
        if not blocks:
            return
        if until_plan is None or until_plan < self._plan:
            self._free.extend(blocks)
        else:
            self._in_transit.append((until_plan, blocks))
            self.num_in_transit += len(blocks)

    def begin_plan(self, number: int) -> None:
        """Plan `number` is being made: the copies of all before it are done when its work begins."""
        self._plan = number
        still: list[tuple[int, Sequence[int]]] = []
        for until_plan, blocks in self._in_transit:
            if until_plan < number:
                self.num_in_transit -= len(blocks)
                self._free.extend(blocks)
            else:
                still.append((until_plan, blocks))
        self._in_transit = still

    def free_ids(self) -> list[int]:
        """A copy of the free list, for the invariant checks."""
        return list(self._free)

    def in_transit_ids(self) -> list[int]:
        """All ids in transit, for the invariant checks."""
        return [block for _, blocks in self._in_transit for block in blocks]
