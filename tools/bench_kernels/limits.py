"""What the machine can do at most, measured by `probes.cpp` in the run that compares kernels with it."""

import ctypes
import os
from collections.abc import Callable
from ctypes import c_double, c_int32, c_int64
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu.build import build

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_UNKNOWN_CACHE = 32 << 20
_READ_CACHES = 8  # the memory that is read for the bandwidth is so many times the last-level cache
_READ_BYTES = (256 << 20, 2 << 30)


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be done at least; a multiply-add is two operations."""

    num_bytes: float
    float32_operations: float = 0
    int16_operations: float = 0
    int8_operations: float = 0

    @property
    def operations(self) -> float:
        return self.float32_operations + self.int16_operations + self.int8_operations


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates per second of all threads together; a multiply-add is two operations."""

    threads: int
    read_bytes: float
    float32_operations: float
    int16_operations: float
    int8_operations: float

    def least_seconds(self, work: Work) -> tuple[float, str]:
        """The time that the work takes at these rates, and what takes it: "memory" or "compute".

        Reading and computing overlap; operations of different types do not, since they use the same units.
        """
        reading = work.num_bytes / self.read_bytes
        computing = (
            work.float32_operations / self.float32_operations
            + work.int16_operations / self.int16_operations
            + work.int8_operations / self.int8_operations
        )
        return max(reading, computing), "memory" if reading >= computing else "compute"

    def text(self) -> str:
        return (
            f"limits with {self.threads} threads: reading {self.read_bytes / 1e9:.1f} GB/s, "
            f"float32 {self.float32_operations / 1e9:.0f} GOP/s, int16 {self.int16_operations / 1e9:.0f} GOP/s, "
            f"int8 {self.int8_operations / 1e9:.0f} GOP/s"
        )


def last_level_cache() -> int:
    """Bytes of the largest cache of the first CPU; a guess where the system does not say."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS), default=_UNKNOWN_CACHE)


def measure_limits(threads: int, seconds: float, progress: Callable[[str], None]) -> Limits:
    """Each of the four for about `seconds`.

    Raises `kernels.cpu.build.BuildError` when the probes can't be compiled, MemoryError when memory or threads are
    lacking.
    """
    library = ctypes.CDLL(str(build(progress=progress, sources=Path(__file__).resolve().parent)))
    read = library.probe_read
    read.argtypes, read.restype = [c_int64, c_int32, c_double], c_double
    multiply = library.probe_float32, library.probe_int16, library.probe_int8
    for probe in multiply:
        probe.argtypes, probe.restype = [c_int32, c_double], c_double
    smallest, largest = _READ_BYTES
    num_bytes = min(max(smallest, _READ_CACHES * last_level_cache()), largest)
    progress(f"limits: reading {num_bytes >> 20} MiB, multiplying float32, int16 and int8, {threads} threads")
    rates = [read(num_bytes, threads, seconds), *(probe(threads, seconds) for probe in multiply)]
    if min(rates) <= 0:
        raise MemoryError(f"the probes could not have {num_bytes >> 20} MiB of memory and {threads} threads")
    return Limits(threads, *rates)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
