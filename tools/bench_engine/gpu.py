"""Steps on a GPU: launched one behind the other, as a rank does it, and what the device does meanwhile."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from config.gpu_memory import gpu_weight_bytes
from config.graphs import graph_buckets
from config.memory_plan import DTYPE_BYTES, kv_bytes_per_token, parameter_count
from config.schema import ModelArch, ModelConfig
from gpu_workers.comm import LocalComm
from gpu_workers.models.llama import LlamaModel
from gpu_workers.runner import Runner, Step
from ipc.engine_messages import SamplingSpec, StepPlan, StepResult
from tools.bench_engine.steps import BLOCK_SIZE, Plans, attention_operations, positions_seen
from tools.gpu_kernels.measure import GpuLimits

_WARM_UPS = 3
_LEAST_STEPS, MOST_STEPS = 10, 256
_PROFILED_STEPS = 20


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """Of steps launched one behind the other. Times in seconds, medians but `idle`."""

    phase: str  # "prefill" or "decode"
    tokens: int  # of a step
    context: int  # at the start
    steps: int
    interval: float  # from one step's result to the next one's
    device: float  # from the arrival of a step's inputs on the device to its sampled tokens
    idle: float  # share of all the time in which the device computed nothing
    fraction: float  # of the limit that binds
    bound: str  # which: "memory" or "compute"
    kernels: float | None = None  # the sum of the times of a step's kernels, each by itself

    @property
    def over_kernels(self) -> float | None:
        """A step's time over that of its kernels: what launches and gaps between kernels cost."""
        return None if self.kernels is None else self.device / self.kernels


class GpuBench:
    """Measures a model on its backend's device."""

    def __init__(
        self,
        model: LlamaModel,
        numbers: ModelConfig,
        sampling: SamplingSpec,
        max_rows: int,
        context: int,
        max_length: int,
        limits: GpuLimits,
        progress: Callable[[float], None],
    ) -> None:
        """Captures graphs for up to `max_rows` sequences of up to `max_length` tokens, as a server does at start.

        `numbers`: the types in which `model` computes. `sampling`: of all requests. The pool holds as many sequences
        that decode after `context` tokens, or one of `max_length`.
        """
        self._arch, self._limits, self._numbers = model.arch, limits, numbers
        self._on_gpu = model.backend.device.type == "cuda"
        self._decode_length = context + MOST_STEPS
        num_blocks = max(max_rows * -(-self._decode_length // BLOCK_SIZE), -(-max_length // BLOCK_SIZE))
        kv = model.allocate_kv(num_blocks, BLOCK_SIZE)
        self._runner = Runner(model, kv, num_blocks, BLOCK_SIZE, max_rows, max_length, LocalComm())
        self._runner.capture(graph_buckets(max_rows), progress)
        self._plans = Plans(model.arch.vocab_size, sampling)

    def prefill(self, tokens: int, seconds: float) -> GpuTimes:
        """Prompts of `tokens` tokens, each in one step of its own."""

        def plans() -> Iterator[StepPlan]:
            while True:
                self._plans.end_all()
                yield self._plans.prompt(0, tokens, tokens)

        found = self._run(plans(), seconds)
        arch = self._arch
        seen = positions_seen(arch, range(1, tokens + 1))
        return self._times("prefill", tokens, 1, 0, found, tokens * arch.num_layers, seen)

    def decode(self, rows: int, context: int, seconds: float) -> GpuTimes:
        """Steps of `rows` requests with prompts of `context` tokens."""
        self._plans.end_all()
        for row in range(rows):
            self._runner.execute(self._plans.prompt(row, context, self._decode_length))
        most = self._decode_length - context - 1
        plans = self._plans.decodes(rows, context, most)
        profiled = plans[-_PROFILED_STEPS:] if self._on_gpu and most > 2 * _PROFILED_STEPS else []
        timed = plans[: most - len(profiled)]
        found = self._run(iter(timed), seconds)
        kernels = None
        if profiled and len(found) == len(timed):
            kernels = self._kernel_seconds(profiled)
        else:
            self._plans.unused(plans[len(found) :])
        seen = rows * positions_seen(self._arch, range(context + 1, context + len(found))) / (len(found) - 1)
        return self._times("decode", rows, rows, context, found, seen, seen, kernels)

    def _run(self, plans: Iterator[StepPlan], seconds: float) -> list[tuple[float, StepResult]]:
        """When the result of each was there, and the result."""
        found: list[tuple[float, StepResult]] = []
        running: Step | None = None
        deadline = time.perf_counter() + seconds

        def collect(step: Step) -> None:
            result = self._runner.collect(step)
            assert result is not None
            found.append((time.perf_counter(), result))

        for plan in plans:
            step = self._runner.launch(plan)
            if running is not None:
                collect(running)
            self._runner.sample(step)
            running = step
            if len(found) >= _LEAST_STEPS and time.perf_counter() >= deadline:
                break
        if running is not None:
            collect(running)
        return found

    def _kernel_seconds(self, plans: Sequence[StepPlan]) -> float | None:
        """The sum of the times of all kernels of a step; None where the driver lets nobody measure them."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for plan in plans:
                self._runner.execute(plan)
            torch.cuda.synchronize()
        total = sum(event.self_device_time_total for event in profiler.key_averages())
        return total / 1e6 / len(plans) if total else None

    def _times(
        self,
        phase: str,
        tokens: int,
        sampled: int,
        context: int,
        found: Sequence[tuple[float, StepResult]],
        kv_positions: float,
        seen: float,
        kernels: float | None = None,
    ) -> GpuTimes:
        """`kv_positions`: read from the pool, `seen`: that queries attend to, of all layers together."""
        timed = found[min(_WARM_UPS, len(found) - 2) :]
        ends = [end for end, _ in timed]
        results = [result for _, result in timed[1:]]
        interval = statistics.median(later - earlier for earlier, later in pairwise(ends))
        device = statistics.median((one.prepare_us + one.forward_us + one.sample_us) / 1e6 for one in results)
        # The copy of a step's inputs, and before it what the device waits for the host.
        idle = sum(one.between_us + one.prepare_us for one in results) / 1e6 / (ends[-1] - ends[0])
        num_bytes, operations = step_work(self._arch, self._numbers, tokens, sampled, kv_positions, seen)
        least, bound = self._limits.least_seconds(num_bytes, operations, self._numbers.dtype)
        return GpuTimes(phase, tokens, context, len(results), interval, device, idle, least / interval, bound, kernels)


def step_work(
    arch: ModelArch, numbers: ModelConfig, tokens: int, sampled: int, kv_positions: float, seen: float
) -> tuple[float, float]:
    """(bytes, operations) that a step needs at least: every weight once, and the keys and values of all sequences.

    Of the embedding only the rows of the step's tokens are read, unless it is the head, too.
    """
    weights, _ = gpu_weight_bytes(arch, numbers)
    table = arch.vocab_size * arch.hidden_size
    of_tokens = parameter_count(arch) - table * (1 if arch.tie_embeddings else 2)
    if not arch.tie_embeddings:
        weights -= DTYPE_BYTES[numbers.dtype] * table
    num_bytes = weights + kv_positions * kv_bytes_per_token(arch, numbers.kv_dtype) / arch.num_layers
    operations = 2.0 * tokens * of_tokens + 2.0 * sampled * table + attention_operations(arch, seen)
    return num_bytes, operations
