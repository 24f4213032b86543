"""How fast cases are on the current GPU, and what this GPU can do at most, both measured in the same run."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tools.gpu_kernels.case import Case, Launch, Prepared

_READ_CACHES = 4  # what is read to empty the L2 cache is so many times its size
_LEAST_READ, _MOST_READ = 256 << 20, 1 << 30  # bytes; AMD's memory-side cache has as much as the first
_WARM_UPS = 3
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 100
_ROUND = 10  # samples between two looks at the time
_MOST_READS = 50  # before a launch
_RESOLUTION = 5e-7  # seconds, of CUDA's events
_COPY_BYTES = 1 << 30
_MATRIX = 8192  # rows and columns of the matrices whose product gives the peak


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Rates per second. `operations` by precision; a precision that this GPU or torch lacks is left out."""

    copy_bytes: float  # read and written, added up
    operations: Mapping[str, float]

    def least_seconds(self, num_bytes: float, operations: float, precision: str) -> tuple[float, str]:
        """The time that the work takes at these rates, and what takes it: "memory" or "compute".

        What is stored in fewer bits than this GPU multiplies is multiplied as bfloat16.
        """
        copying = num_bytes / self.copy_bytes
        peak = self.operations.get(precision) or self.operations.get("bfloat16", math.inf)
        computing = operations / peak
        return max(copying, computing), "memory" if copying >= computing else "compute"

    def text(self) -> str:
        peaks = [f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in self.operations.items()]
        return f"limits: copying {self.copy_bytes / 1e9:.0f} GB/s, matrix products {', '.join(peaks)}"


@dataclass(frozen=True, slots=True)
class Measured:
    """A case's median time, and that of its rival where it has one that runs here."""

    seconds: float
    fraction: float  # of the limit that binds
    bound: str  # which: "memory" or "compute"
    rival_seconds: float | None = None
    rival_error: str = ""  # why the rival was not measured

    @property
    def speedup(self) -> float | None:
        """The rival's time over this one's."""
        return None if self.rival_seconds is None else self.rival_seconds / self.seconds


class Stopwatch:
    """Medians of the time that launches take on the GPU, with nothing of their data in its L2 cache.

    Before each sample a large buffer is read, which also gives the CPU time to enqueue the launch: Python's time is not
    in what is measured. Another one is read behind the launch, within the time that is taken, and the time of reading
    alone is subtracted: so writing back what the launch left in the cache counts. What reading leaves there need not be
    written, and two buffers have nothing of the second one left when it is read.
    """

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        num_bytes = min(max(_READ_CACHES * cache, _LEAST_READ), _MOST_READ)
        if torch.version.hip:
            num_bytes = _MOST_READ
        self._before, self._behind = torch.zeros(2, num_bytes // 4, device=device)
        self._sum = torch.empty((), device=device)
        for _ in range(_WARM_UPS):
            self._sample(lambda: None, 1)
        times = [self._sample(lambda: None, 1) for _ in range(_LEAST_SAMPLES)]
        torch.cuda.synchronize()
        self._read_seconds = statistics.median(elapsed() for elapsed in times)

    def _sample(self, launch: Launch, reads: int) -> Callable[[], float]:
        """Enqueue a launch with `reads` before it and one behind; the seconds of it and that one, once it is done."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(reads):
            torch.sum(self._before, dim=0, out=self._sum)
        start.record()
        launch()
        torch.sum(self._behind, dim=0, out=self._sum)
        end.record()
        return lambda: start.elapsed_time(end) / 1e3

    def seconds(self, launch: Launch, budget: float) -> float:
        """The median time of a launch, taken within about `budget` seconds, and from at least five launches."""
        for _ in range(_WARM_UPS):
            launch()
        torch.cuda.synchronize()
        started = time.perf_counter()
        launch()
        enqueued = time.perf_counter() - started
        torch.cuda.synchronize()
        reads = min(1 + math.ceil(2 * enqueued / self._read_seconds), _MOST_READS)
        deadline = time.perf_counter() + budget
        both: list[float] = []
        alone: list[float] = []
        while len(both) < _LEAST_SAMPLES or (len(both) < _MOST_SAMPLES and time.perf_counter() < deadline):
            count = _ROUND if both else _LEAST_SAMPLES
            # Turn by turn, so that a change of clocks is in both.
            samples = [(self._sample(launch, reads), self._sample(lambda: None, 1)) for _ in range(count)]
            torch.cuda.synchronize()
            both += [elapsed() for elapsed, _ in samples]
            alone += [elapsed() for _, elapsed in samples]
        return max(statistics.median(both) - statistics.median(alone), _RESOLUTION)


def measure(case: Case, prepared: Prepared, stopwatch: Stopwatch, limits: GpuLimits, budget: float) -> Measured:
    """Times of the case and of its rival, within about twice `budget` seconds. Raises what the launch raises."""
    seconds = stopwatch.seconds(prepared.launch, budget)
    least, bound = limits.least_seconds(case.num_bytes, case.operations, case.precision)
    rival_seconds, rival_error = None, ""
    if prepared.rival is not None:
        try:
            rival_seconds = stopwatch.seconds(prepared.rival, budget)
        except Exception as error:  # a library that lacks the shape on this GPU is no failure of ours
            rival_error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Measured(seconds, least / seconds, bound, rival_seconds, rival_error)


def measure_limits(stopwatch: Stopwatch, device: torch.device, budget: float) -> GpuLimits:
    """What copying and multiplying large matrices by torch reaches, each within about `budget` seconds."""
    free, _ = torch.cuda.mem_get_info(device)
    num_bytes = min(_COPY_BYTES, free // 4)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_bytes = 2 * num_bytes / stopwatch.seconds(lambda: target.copy_(source), budget)
    operations = {}
    for precision, multiply in _products(device):
        try:
            seconds = stopwatch.seconds(multiply, budget)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # this GPU or torch has no such product
            continue
        operations[precision] = 2 * _MATRIX**3 / seconds
    return GpuLimits(copy_bytes, operations)


@contextmanager
def keep_busy(device: torch.device, limits: GpuLimits) -> Iterator[None]:
    """Meanwhile the GPU multiplies matrices, for about a second at most."""
    a = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    for _ in range(math.ceil(limits.operations["bfloat16"] / (2 * _MATRIX**3))):
        torch.matmul(a, a, out=out)
    yield
    torch.cuda.synchronize()


def _products(device: torch.device) -> Iterator[tuple[str, Launch]]:
    """(precision, product of random matrices), with the second operand stored by columns, as weights are."""
    a, b = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device) for _ in range(2))
    yield "bfloat16", lambda: torch.matmul(a, b.t())
    af, bf = a.float(), b.float()
    yield "float32", lambda: torch.matmul(af, bf.t())
    float8 = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn
    a8, b8 = a.to(float8), b.to(float8)
    one = torch.ones((), device=device)
    yield (
        "float8",
        lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True),
    )
    ai, bi = (matrix.mul(32).clamp(-127, 127).to(torch.int8) for matrix in (a, b))
    yield "int8", lambda: torch._int_mm(ai, bi.t())
