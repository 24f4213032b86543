"""Simulated runs: what must hold for any trace, and what batching must not make worse."""

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.schema import SchedulerConfig
from scheduler_proc.batching import Batching
from tools.simulate.costs import StepCost
from tools.simulate.observer import Status
from tools.simulate.simulator import Setup, Simulation
from tools.simulate.summary import Slo, summarize
from tools.simulate.traces import BlockPrompt, TraceRequest, infinite_cache_hits, read_trace

COST = StepCost(5000.0, 300.0, 250.0, 0.05, 0.01)
CONFIG = SchedulerConfig(max_seqs=4, max_step_tokens=32, prefill_chunk=16, block_size=4)


def setup(config: SchedulerConfig = CONFIG, num_blocks: int = 400, **changes: Any) -> Setup:
    plain = Setup(
        label="run",
        config=config,
        num_blocks=num_blocks,
        num_host_blocks=0,
        max_model_len=200,
        batching="continuous",
        cost=COST,
    )
    return replace(plain, **changes)


def request(time: float, first: int, length: int, output: int) -> TraceRequest:
    return TraceRequest(time, BlockPrompt(array("q", [first]), length, length), length, output)


TRACES = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 60), st.integers(1, 30), st.booleans()), min_size=1, max_size=25
)


def trace_of(rows: list[tuple[float, int, int, bool]]) -> list[TraceRequest]:
    """Gaps in seconds, lengths, and whether the prompt begins like the others that do."""
    time = 0.0
    trace = []
    for index, (gap, length, output, shared) in enumerate(rows):
        trace.append(request(time, 1 if shared else 1000 + 100 * index, length, output))
        time += gap
    return trace


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=TRACES,
    batching=st.sampled_from(["static", "dynamic", "continuous"]),
    shortage=st.sampled_from(["wait", "recompute", "swap"]),
    num_blocks=st.integers(23, 80),
    wait_ms=st.sampled_from([0.0, 40.0]),
)
def test_every_request_finishes_with_all_its_tokens(
    rows: list[tuple[float, int, int, bool]], batching: Batching, shortage: Any, num_blocks: int, wait_ms: float
) -> None:
    trace = trace_of(rows)
    config = msgspec.structs.replace(CONFIG, kv_shortage=shortage, batch_wait_ms=wait_ms)
    run = Simulation(trace, setup(config, num_blocks, batching=batching, num_host_blocks=20)).run()
    observer = run.observer
    assert set(observer.status.tolist()) == {Status.FINISHED}
    assert observer.num_tokens.tolist() == [row.output_length for row in trace]
    assert (observer.arrival == [row.time for row in trace]).all()
    assert (observer.started >= observer.arrival).all()
    # Nothing is faster than a step, and the device does one at a time.
    assert (observer.first - observer.started >= COST.fixed / 1e6 * 0.999).all()
    assert run.busy_seconds <= run.simulated_seconds * (1 + 1e-9)
    assert run.decisions >= sum(row.output_length for row in trace)
    assert run.stats.finished == len(trace)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 30)), min_size=4, max_size=24),
)
def test_all_at_once_batches_are_hardly_ever_faster_than_continuous_batching(lengths: list[tuple[int, int]]) -> None:
    """With everything there from the start all three begin with the same full batch, and only continuous batching uses
    a place that becomes free. It does so one step late, since the next step was planned before: a request that would be
    in the n-th batch (from 0) therefore starts at most n steps later than there, and usually far earlier.
    """
    trace = [request(0.0, 100 * index + 1, prompt, output) for index, (prompt, output) in enumerate(lengths)]
    config = msgspec.structs.replace(
        CONFIG, max_step_tokens=256, prefill_chunk=64, prefix_cache=False, batch_wait_ms=0.5
    )
    cost = StepCost(1000.0, 0.0, 0.0, 0.0, 0.0)
    times = {}
    batching: Batching
    for batching in ("static", "dynamic", "continuous"):
        run = Simulation(trace, setup(config, batching=batching, cost=cost)).run()
        times[batching] = run.simulated_seconds
    step, batches_before_the_last = 0.001, (len(lengths) - 1) // 4
    assert times["continuous"] <= times["dynamic"] + batches_before_the_last * step + 1e-9
    assert times["dynamic"] == pytest.approx(times["static"])


def test_continuous_batching_pays_when_outputs_differ() -> None:
    """Outputs of 5 to 60 tokens: at least a third more throughput than in batches."""
    trace = [request(0.0, 100 * index + 1, 10, 5 + 37 * index % 56) for index in range(60)]
    config = msgspec.structs.replace(CONFIG, max_step_tokens=256, prefill_chunk=64, batch_wait_ms=0.5)
    cost = StepCost(1000.0, 0.0, 0.0, 0.0, 0.0)
    dynamic = Simulation(trace, setup(config, batching="dynamic", cost=cost)).run()
    continuous = Simulation(trace, setup(config, batching="continuous", cost=cost)).run()
    assert continuous.simulated_seconds < 0.75 * dynamic.simulated_seconds


def test_batching_by_hand() -> None:
    """Two places; outputs of 2, 8, 2 tokens. Static and dynamic make the third wait for the second's end."""
    trace = [request(0.0, 1, 3, 2), request(0.0, 11, 3, 8), request(0.0, 21, 3, 2)]
    config = msgspec.structs.replace(CONFIG, max_seqs=2, prefix_cache=False, batch_wait_ms=0.5)
    cost = StepCost(1000.0, 0.0, 0.0, 0.0, 0.0)
    ends: dict[str, list[float]] = {}
    batching: Batching
    for batching in ("static", "dynamic", "continuous"):
        run = Simulation(trace, setup(config, batching=batching, cost=cost)).run()
        ends[batching] = [round(value, 6) for value in run.observer.last.tolist()]
    assert ends["static"] == ends["dynamic"] == pytest.approx([0.002, 0.008, 0.010])
    # The step after the first request's last one was planned before that was known.
    assert ends["continuous"] == pytest.approx([0.002, 0.008, 0.005])


def test_too_long_requests_are_refused_and_hold_up_nobody() -> None:
    trace = [request(0.0, 1, 90, 10), request(0.0, 200, 10, 10)]
    run = Simulation(trace, setup(max_model_len=99)).run()
    assert run.observer.status.tolist() == [Status.REFUSED, Status.FINISHED]
    found = summarize(run, Slo(1.0, 1.0), 0.0)
    assert (found.latencies.refused, found.latencies.met_slo) == (1, 1)


def test_known_outputs_are_what_the_model_says() -> None:
    """A chat: the second turn begins with the first one's prompt and output, which are cached by then."""
    first = TraceRequest(0.0, array("i", range(1, 9)).tobytes(), 8, 8, array("i", range(50, 58)).tobytes())
    prompt = array("i", [*range(1, 9), *range(50, 58), 99])
    second = TraceRequest(5.0, prompt.tobytes(), 17, 1)
    run = Simulation([first, second], setup()).run()
    # 15 positions were computed (the last output never is): three blocks of 4 are full.
    assert run.stats.cached_tokens == 12


def test_the_online_cost_model_learns_what_the_device_costs() -> None:
    trace = [request(0.05 * index, 100 * index + 1, 5 + index % 40, 3 + index % 17) for index in range(60)]
    simulation = Simulation(trace, setup())
    simulation.run()
    model = simulation._core.cost_model
    assert model.ready
    assert model.relative_error < 0.02


def test_the_mooncake_trace_hits_as_often_as_the_infinite_cache(shared_dir: Path) -> None:
    """The known rate is 0.32."""
    trace = read_trace(shared_dir / "traces" / "mooncake_conversation_div16.jsonl")
    config = SchedulerConfig(max_seqs=64, max_step_tokens=512, prefill_chunk=512)
    blocks = sum((row.input_length + row.output_length) // 16 + 2 for row in trace)
    slow = StepCost(30_000.0, 100.0, 0.0, 0.0, 0.0)  # few steps with many requests, which takes less real time
    run = Simulation(trace, setup(config, blocks, max_model_len=8192, cost=slow)).run()
    prompt_tokens = sum(row.input_length for row in trace)
    assert run.stats.finished == len(trace)
    assert run.stats.cached_tokens / prompt_tokens == pytest.approx(0.32, abs=0.005)
    assert run.stats.cached_tokens == pytest.approx(infinite_cache_hits(trace, 16), rel=0.002)
