"""A trace through the real scheduler core: virtual clock, no device, no sockets.

The device is one worker that takes steps in the order of their plans; a step lasts as long as `StepCost` says, times a
factor drawn from those measured of steps like it where `Setup.variation` has them. Time that the scheduler itself needs
is not simulated: in the server it passes while the device runs the step before.
"""

import math
import random
import time as real_time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from config.schema import SchedulerConfig
from ipc.codec import unpack_ints
from ipc.engine_messages import SamplingSpec, StepPlan, StepResult, Submit
from ipc.stats_messages import Stats
from scheduler_proc.batching import Batching
from scheduler_proc.core import SchedulerCore
from scheduler_proc.cost_model import CostModel
from scheduler_proc.event_log import REPLAY_VOCABULARY, Header, Recorder
from scheduler_proc.events import Arrived, Command, EngineReady, Event, StepDone, Tick, WakeAt
from tools.simulate.costs import PARTS, Outside, StepCost, Variation, shape_of
from tools.simulate.observer import Arriving, Observer, Sample
from tools.simulate.traces import OUTPUT_TOKEN, TraceRequest

_PEER = b"trace"
_STEPS_PER_SAMPLE = 16
_STEPS_PER_PROGRESS = 256

Progress = Callable[[int, int], None]  # decisions so far, requests that have arrived


class SimulationError(Exception):
    """The core does not go on although requests wait: a bug, or a batch that can never form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated beside the trace."""

    label: str
    config: SchedulerConfig
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    batching: Batching
    cost: StepCost
    copy_us: float = 0.0  # for a block between KV pool and host
    variation: Variation = field(default_factory=Variation)
    outside: Outside = field(default_factory=Outside)
    warm: bool = False  # the scheduler knows the costs from the start, as that of a server does that has run before


@dataclass(slots=True)
class Run:
    """What came of a simulation."""

    setup: Setup
    observer: Observer
    stats: Stats
    steps: int = 0
    decisions: int = 0  # scheduled rows, summed over the steps
    simulated_seconds: float = 0.0
    real_seconds: float = 0.0
    parts: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))  # seconds of the device, by `PARTS`
    busy_seconds: float = 0.0


@dataclass(slots=True)
class _Step:
    number: int
    seconds: float
    tokens: bytes  # int32, what it samples


class Simulation:
    """One run of a trace."""

    def __init__(
        self, trace: list[TraceRequest], setup: Setup, progress: Progress | None = None, log: BinaryIO | None = None
    ) -> None:
        """`log`: where the core's events are recorded."""
        self._trace = trace
        self._setup = setup
        self._progress = progress
        self._core = SchedulerCore(
            setup.config,
            num_blocks=setup.num_blocks,
            max_model_len=setup.max_model_len,
            vocab_size=REPLAY_VOCABULARY,
            num_host_blocks=setup.num_host_blocks,
            batching=setup.batching,
            cost_model=CostModel.from_coefficients(setup.cost.coefficients) if setup.warm else None,
        )
        self._handle: Callable[[Event], list[Command]] = self._core.handle
        if log is not None:
            header = Header(
                config=setup.config,
                num_blocks=setup.num_blocks,
                num_host_blocks=setup.num_host_blocks,
                max_model_len=setup.max_model_len,
            )
            self._handle = Recorder(self._core.handle, log, header, REPLAY_VOCABULARY).handle
        self._observer = Observer(len(trace))
        self._run = Run(setup, self._observer, self._core.stats(0.0, 0.0))
        self._steps: deque[_Step] = deque()  # given to the device; the first one runs
        self._step_ends = math.inf
        self._wake = math.inf
        self._next = 0  # request of the trace
        self._known_outputs = any(request.outputs for request in trace)
        self._on_the_way = setup.outside.arrive_us / 1e6
        self._random = random.Random(0)  # every run draws the same, so that runs differ by their settings alone

    @property
    def core(self) -> SchedulerCore:
        """The core that is driven."""
        return self._core

    def run(self) -> Run:
        """To the end of the last request."""
        begun = real_time.perf_counter()
        run, trace = self._run, self._trace
        now = 0.0
        self._event(EngineReady(now))
        while True:
            arrival = trace[self._next].time + self._on_the_way if self._next < len(trace) else math.inf
            now = min(self._step_ends, arrival, self._wake)
            if now == math.inf or (arrival == math.inf and not self._steps and not self._core.requests):
                break  # pins may still be there to expire
            if self._step_ends == now:
                self._finish_step(now)
            elif arrival == now:
                self._arrive(now)
            else:
                self._event(Tick(now))
        if self._core.requests:
            raise SimulationError(f"{len(self._core.requests)} requests wait, but the core plans nothing any more")
        run.real_seconds = real_time.perf_counter() - begun
        run.simulated_seconds = self._observer.end
        run.stats = self._core.stats(self._observer.end, 0.0)
        return run

    def _arrive(self, now: float) -> None:
        number = self._next
        self._next += 1
        if self._next == len(self._trace):
            self._core.gate.min_batch = 1  # no more will come: a static batch need not be full
        request = self._trace[number]
        submit = Submit(
            number,
            request.token_ids(),
            request.output_length,
            0,
            b"",
            SamplingSpec(seed=number),
            namespace=request.namespace,
            tenant=request.tenant,
            priority=request.priority,
            ttft_target_ms=request.ttft_target_ms,
            cache_pin_seconds=request.pin_seconds,
        )
        self._event(Arrived(now, _PEER, submit), Arriving(number, _PEER, number, request.time))

    def _event(self, event: Event, arriving: Arriving | None = None) -> None:
        commands = self._handle(event)
        self._wake = math.inf
        for command in commands:
            if isinstance(command, WakeAt):
                self._wake = command.time
        for plan in self._observer.see(event.time, commands, arriving):
            self._take_plan(event.time, plan)
        if not self._steps:
            self._sample(event.time)

    # --- the device ---

    def _take_plan(self, now: float, plan: StepPlan) -> None:
        run, setup = self._run, self._setup
        shape = shape_of(plan)
        seconds = setup.cost.seconds(shape, setup.copy_us) * setup.variation.draw(shape, self._random)
        tokens = self._known_tokens(plan) if self._known_outputs else bytes(4 * shape.sampled)
        run.steps += 1
        run.decisions += shape.rows
        run.busy_seconds += seconds
        if shape.rows:
            run.parts = [total + part for total, part in zip(run.parts, setup.cost.parts(shape), strict=True)]
        if not self._steps:
            self._step_ends = now + seconds
        self._steps.append(_Step(plan.step, seconds, tokens))
        if run.steps % _STEPS_PER_SAMPLE == 1:
            self._sample(now)
        if self._progress is not None and run.steps % _STEPS_PER_PROGRESS == 0:
            self._progress(run.decisions, self._next)

    def _finish_step(self, now: float) -> None:
        step = self._steps.popleft()
        self._step_ends = now + self._steps[0].seconds if self._steps else math.inf
        self._event(StepDone(now, StepResult(step.number, step.tokens, forward_us=round(step.seconds * 1e6))))

    def _known_tokens(self, plan: StepPlan) -> bytes:
        """What the trace says that these rows sampled; the position tells which of a request's outputs it is."""
        columns = unpack_ints(plan.scheduled)
        tokens = []
        for row, start, count, sample in zip(columns[::4], columns[1::4], columns[2::4], columns[3::4], strict=True):
            if sample:
                request = self._trace[self._observer.number_of_row(row)]
                known = unpack_ints(request.outputs)
                index = start + count - request.input_length
                tokens.append(known[index] if index < len(known) else OUTPUT_TOKEN)
        return np.array(tokens, dtype=np.int32).tobytes()

    def _sample(self, now: float) -> None:
        stats = self._core.stats(now, 0.0)
        kv = self._core.kv
        used = kv.pool.total - kv.pool.num_free - kv.pool.num_in_transit - kv.tree.num_evictable
        self._observer.samples.append(Sample(now, stats.running, stats.waiting, used / kv.pool.total))
