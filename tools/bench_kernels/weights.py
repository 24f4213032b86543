"""Packed weights of random values, in copies that are used one after the other, so that none is in a cache by then."""

import ctypes
from collections.abc import Sequence

import torch

from kernels.cpu.library import GROUP, Kind, PackedWeight

_MOST_BYTES = 1 << 30  # of all copies of a weight
_MOST_COPIES = 2048


def _pack(library: ctypes.CDLL, kind: Kind, n: int, k: int, copies: int) -> list[PackedWeight]:
    random = torch.Generator().manual_seed(0)
    if kind in (Kind.FLOAT32, Kind.BFLOAT16):
        values = torch.rand(n, k, generator=random).sub_(0.5)
        return [PackedWeight.from_float(library, values, kind) for _ in range(copies)]
    scales = torch.rand(n, k // GROUP, generator=random) * 0.01
    if kind == Kind.INT8:
        codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=random)
        return [PackedWeight.from_int8(library, codes, scales) for _ in range(copies)]
    codes = torch.randint(16, (n, k), dtype=torch.uint8, generator=random)
    return [PackedWeight.from_int4(library, codes, scales, scales * -8) for _ in range(copies)]


class Weights:
    """Makes copies of an [N, K] weight until they fill `working_set` bytes, and keeps those last asked for."""

    def __init__(self, library: ctypes.CDLL, working_set: int) -> None:
        self._library = library
        self._working_set = min(working_set, _MOST_BYTES)
        self._key: tuple[Kind, int, int] | None = None
        self._copies: Sequence[PackedWeight] = ()

    def copies(self, kind: Kind, n: int, k: int) -> Sequence[PackedWeight]:
        if self._key != (kind, n, k):
            self._key, self._copies = None, ()  # before the next take memory
            first = _pack(self._library, kind, n, k, 1)
            more = min(-(-self._working_set // first[0].num_bytes), _MOST_COPIES) - 1
            self._copies = first + (_pack(self._library, kind, n, k, more) if more > 0 else [])
            self._key = (kind, n, k)
        return self._copies
