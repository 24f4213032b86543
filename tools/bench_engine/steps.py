"""Steps of the runner, planned ahead as a scheduler would, and where their time goes."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from config.schema import ModelArch
from gpu_workers.backend import Backend
from gpu_workers.comm import LocalComm
from gpu_workers.models.llama import LlamaModel
from gpu_workers.runner import Runner
from ipc.codec import pack_ints
from ipc.engine_messages import NewRow, SamplingSpec, StepPlan
from tools.bench_engine.measured import MeasuredBackend

BLOCK_SIZE = 16
LEAST_STEPS = 3
MOST_STEPS = 256


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over `steps` steps, in seconds.

    `interval`: from one step's start to the next one's, with nothing to wait for in between. `kernels`: within the
    native kernels; where they are torch's, all of the forward. `rest`: what is in none of the three parts.
    """

    steps: int
    interval: float
    kernels: float
    outside: float  # 1 - kernels / interval
    prepare: float
    forward: float
    sample: float
    rest: float


@dataclass(frozen=True, slots=True)
class _Sample:
    start: float
    end: float
    kernels: float
    prepare: float
    forward: float
    sample: float


class Plans:
    """What a scheduler would tell a runner: prompts of random tokens, and the decoding of all of them."""

    def __init__(self, vocab_size: int, sampling: SamplingSpec) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._sampling = sampling
        self._next_step = 0
        self._rows: list[int] = []
        self._ended: list[int] = []

    def _plan(self, scheduled: list[tuple[int, int, int, int]], new: tuple[NewRow, ...] = ()) -> StepPlan:
        plan = StepPlan(
            self._next_step, new, pack_ints(self._ended), b"", pack_ints(value for row in scheduled for value in row)
        )
        self._next_step += 1
        self._ended = []
        return plan

    def prompt(self, row: int, tokens: int, length: int) -> StepPlan:
        """The step of a new request with a prompt of `tokens` random tokens, and blocks for `length`."""
        ids = [self._random.randrange(self._vocab_size) for _ in range(tokens)]
        blocks = -(-length // BLOCK_SIZE)
        new = NewRow(row, pack_ints(ids), tokens, pack_ints(range(row * blocks, (row + 1) * blocks)), self._sampling)
        plan = self._plan([(row, 0, tokens, 1)], (new,))
        self._rows.append(row)
        return plan

    def decodes(self, rows: int, context: int, steps: int) -> list[StepPlan]:
        """Of `rows` requests with prompts of `context` tokens."""
        return [self._plan([(row, context + step, 1, 1) for row in range(rows)]) for step in range(steps)]

    def unused(self, plans: Sequence[StepPlan]) -> None:
        """The last plans were not carried out."""
        self._next_step -= len(plans)

    def end_all(self) -> None:
        """The next plan frees all rows."""
        self._ended += self._rows
        self._rows = []


class Steps:
    """Runs prompts and decodes, with `sampling`, on a model in this process with a KV pool of `num_blocks` blocks."""

    def __init__(
        self, model: LlamaModel, max_rows: int, max_length: int, num_blocks: int, sampling: SamplingSpec
    ) -> None:
        kv = model.allocate_kv(num_blocks, BLOCK_SIZE)
        self._runner = Runner(model, kv, num_blocks, BLOCK_SIZE, max_rows, max_length, LocalComm())
        self._backend: Backend = model.backend
        self._plans = Plans(model.arch.vocab_size, sampling)

    def _execute(self, plan: StepPlan) -> _Sample:
        measured = self._backend if isinstance(self._backend, MeasuredBackend) else None
        before = measured.engine.seconds if measured else 0.0
        start = time.perf_counter()
        result = self._runner.execute(plan)
        end = time.perf_counter()
        assert result is not None
        forward = result.forward_us / 1e6
        kernels = measured.engine.seconds - before if measured else forward
        return _Sample(start, end, kernels, result.prepare_us / 1e6, forward, result.sample_us / 1e6)

    def prefill(self, tokens: int, seconds: float) -> StepTimes:
        """Prompts of `tokens` tokens, each in one step of its own."""
        samples: list[_Sample] = []
        deadline = 0.0
        while len(samples) <= LEAST_STEPS or (time.perf_counter() < deadline and len(samples) <= MOST_STEPS):
            self._plans.end_all()
            samples.append(self._execute(self._plans.prompt(0, tokens, tokens)))
            if len(samples) == 1:
                deadline = time.perf_counter() + seconds
        del samples[0]  # in which buffers may have grown
        return _medians(samples, [sample.end - sample.start for sample in samples])

    def decode(self, rows: int, context: int, seconds: float) -> tuple[StepTimes, Sequence[int]]:
        """Steps of `rows` requests with prompts of `context` tokens, and how long their contexts were in each."""
        self._plans.end_all()
        for row in range(rows):
            self._execute(self._plans.prompt(row, context, context + MOST_STEPS))
        plans = self._plans.decodes(rows, context, MOST_STEPS)
        samples: list[_Sample] = []
        deadline = time.perf_counter() + seconds
        for plan in plans:
            if len(samples) > LEAST_STEPS and time.perf_counter() >= deadline:
                break
            samples.append(self._execute(plan))
        self._plans.unused(plans[len(samples) :])
        starts = [sample.start for sample in samples]
        intervals = [later - earlier for earlier, later in pairwise(starts)]
        return _medians(samples[:-1], intervals), range(context + 1, context + len(samples))


def _medians(samples: list[_Sample], intervals: list[float]) -> StepTimes:
    median = statistics.median
    pairs = list(zip(samples, intervals, strict=True))
    return StepTimes(
        steps=len(samples),
        interval=median(intervals),
        kernels=median(each.kernels for each in samples),
        outside=median(1 - each.kernels / interval for each, interval in pairs),
        prepare=median(each.prepare for each in samples),
        forward=median(each.forward for each in samples),
        sample=median(each.sample for each in samples),
        rest=median(interval - each.prepare - each.forward - each.sample for each, interval in pairs),
    )


def positions_seen(arch: ModelArch, contexts: Sequence[int]) -> int:
    """Positions that queries with such contexts, themselves included, attend to: all queries and layers together."""
    windows = arch.windows or (0,) * arch.num_layers
    return sum(min(context, window or context) for window in windows for context in contexts)


def attention_operations(arch: ModelArch, seen: float) -> float:
    """Of queries that see so many positions, all queries and layers together; two for a multiply-add."""
    return 4.0 * seen * arch.num_heads * arch.head_dim
