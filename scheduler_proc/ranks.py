"""Which ranks of the replica are there."""


class Ranks:
    """They come and go together: a rank that is replaced has its companions replaced too.

    All ranks of one generation share an incarnation. The engine is ready once all of one generation have reported; a
    straggler of an older one, whose loss is noticed late, is never counted among its successors.
    """

    def __init__(self, count: int) -> None:
        self.names = tuple(b"rank%d" % rank for rank in range(count))
        self.ready = False
        self._reported: dict[bytes, int] = {}

    @property
    def incarnation(self) -> int:
        """Of all ranks, while they are ready."""
        return self._reported[self.names[0]]

    def reported(self, rank: bytes, incarnation: int) -> bool:
        """A rank can compute. True when it was the last one missing."""
        self._reported[rank] = incarnation
        was_ready = self.ready
        self.ready = len(self._reported) == len(self.names) and len(set(self._reported.values())) == 1
        return self.ready and not was_ready

    def lost(self, rank: bytes) -> bool:
        """A rank is gone. True when it was the first one missing."""
        self._reported.pop(rank, None)
        was_ready = self.ready
        self.ready = False
        return was_ready
