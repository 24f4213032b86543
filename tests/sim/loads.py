"""Synthetic loads for the simulator, and what a diagnosis needs to know of a run of it."""

import random
from collections.abc import Generator
from dataclasses import astuple, replace
from typing import TypeVar

import msgspec
import numpy as np

from config.bytesize import parse_size
from config.schema import Config, ModelConfig, SchedulerConfig, WorkerConfig
from ipc.stats_messages import Diagnosis, MetricName
from scheduler_proc.cost_model import CostModel
from scheduler_proc.diagnosis.changes import Engine
from scheduler_proc.diagnosis.diagnoser import diagnose
from scheduler_proc.diagnosis.processes import Cpu
from scheduler_proc.diagnosis.window import Window, ended
from scheduler_proc.diagnosis.workload import Facts, facts_of
from tools.simulate.costs import DEFAULT_COST
from tools.simulate.settings import resolved
from tools.simulate.simulator import Setup, Simulation
from tools.simulate.traces import TraceRequest

T = TypeVar("T")
BLOCK_BYTES = 1 << 16  # of KV, made up
COEFFICIENTS = tuple(microseconds / 1e6 for microseconds in astuple(DEFAULT_COST))


def finish(work: Generator[None, None, T]) -> T:
    """What a generator returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def load(
    seed: int,
    requests: int,
    rate: float,
    prompt: int,
    outputs: int,
    *,
    long: int = 0,
    every: int = 0,
    shared: int = 0,
) -> list[TraceRequest]:
    """Poisson arrivals, `rate` a second; lengths within 30% of their mean, of prompts besides `shared` equal tokens.

    With `every`, each so many-th prompt has `long` tokens of its own.
    """
    draw = random.Random(seed)
    time, fresh = 0.0, 1 + shared
    trace = []
    for number in range(requests):
        time += draw.expovariate(rate)
        own = long if every and number % every == every // 2 else max(1, round(prompt * draw.uniform(0.7, 1.3)))
        tokens = np.concatenate([np.arange(1, 1 + shared), np.arange(fresh, fresh + own)]).astype(np.int32)
        fresh += own
        trace.append(
            TraceRequest(time, tokens.tobytes(), shared + own, max(1, round(outputs * draw.uniform(0.7, 1.3))))
        )
    return trace


class ClosedLoop(Simulation):
    """The requests of a trace, each sent when one of so many clients has got its answer; times are overwritten."""

    def __init__(self, trace: list[TraceRequest], setup: Setup, clients: int) -> None:
        later = [replace(request, time=0.0 if number < clients else np.inf) for number, request in enumerate(trace)]
        super().__init__(later, setup)
        self._sent = clients

    def _finish_step(self, now: float) -> None:
        before = len(self._core.requests)
        super()._finish_step(now)
        for _ in range(before - len(self._core.requests)):
            if self._sent < len(self._trace):
                self._trace[self._sent] = replace(self._trace[self._sent], time=now)
                self._sent += 1


class Observed:
    """A run, what was measured from outside, and what the core's window knows of it."""

    def __init__(self, trace: list[TraceRequest], settings: SchedulerConfig, blocks: int, clients: int = 0) -> None:
        """`clients` above 0: a closed loop of so many."""
        self.config = resolved(settings)
        self.blocks = blocks
        setup = Setup(
            label="",
            config=self.config,
            num_blocks=blocks,
            num_host_blocks=0,
            max_model_len=1 << 17,
            batching="continuous",
            cost=DEFAULT_COST,
        )
        simulation = ClosedLoop(list(trace), setup, clients) if clients else Simulation(trace, setup)
        core = self._core = simulation.core
        core.window = self.window = Window(self.config.block_size, 1e9)
        observer = simulation.run().observer
        assert not np.isnan(observer.last).any(), "every request got its outputs"
        self.end = observer.end
        first = observer.first - observer.arrival
        gaps = observer.gaps
        self.longest_gap = float(gaps.max())
        self.metrics: dict[MetricName, float] = {
            "ttft": float(first.mean()),
            "ttft_p99": float(np.percentile(first, 99, method="inverted_cdf")),
            "itl": float(gaps.mean()),
            "itl_p99": float(np.percentile(gaps, 99, method="inverted_cdf")),
            "throughput": float(observer.num_tokens.sum() / (observer.end - observer.arrival[0])),
        }

    def diagnosis(self, cpu: Cpu | None = None) -> Diagnosis:
        """Made at the end of the run, of all of it."""
        return finish(diagnose(self.engine(), self.facts(), self.cost, cpu or Cpu(), 0.0))

    @property
    def cost(self) -> CostModel:
        """Fitted in the run."""
        return self._core.cost_model

    def facts(self) -> Facts:
        """What the diagnosis is made of."""
        live = [ended(request, self.end, "aborted") for request in self._core.requests.values()]
        return facts_of(self.window, live, self._core.totals(self.end), self.cost, self.end)

    def engine(self) -> Engine:
        """As a server would be started."""
        config = Config(
            model=ModelConfig(kv_dtype="float16"),
            scheduler=self.config,
            worker=WorkerConfig(device="cpu", threads=2),
        )
        return Engine(config=config, num_blocks=self.blocks, kv_memory_bytes=self.blocks * BLOCK_BYTES, cores=2)


def changed(settings: SchedulerConfig, blocks: int, flag: str, after: str) -> tuple[SchedulerConfig, int]:
    """The resolved settings and the pool with one flag changed."""
    if flag == "--kv-memory":
        return settings, parse_size(after) // BLOCK_BYTES
    if flag == "--kv-dtype":
        return settings, int(blocks * 2 / 1.06)
    name = flag.removeprefix("--").replace("-", "_")
    values: dict[str, object] = {name: {"on": True, "none": None}.get(after, after)}
    if flag == "--max-step-tokens":
        values["prefill_chunk"] = min(int(after), 1 << 20)
    plain = {**msgspec.structs.asdict(settings), **values}
    return msgspec.convert(plain, SchedulerConfig, strict=False), blocks
