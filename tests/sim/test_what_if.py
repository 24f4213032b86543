"""The quick model of the planner against the scheduler core itself, on the same loads with the same costs."""

from dataclasses import replace
from typing import Any

import pytest

from config.schema import SchedulerConfig
from scheduler_proc.cost_model import CostModel
from scheduler_proc.diagnosis.changes import setup_of
from scheduler_proc.diagnosis.what_if import Job, Load, Outcome, Replay, Setup, Spread
from tests.sim.loads import COEFFICIENTS, Observed, finish, load
from tools.simulate.traces import TraceRequest

POOL = 100_000
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_seqs": 4},
    {"max_step_tokens": 64},
    {"max_itl_ms": 60},
    {"prefer": "decode"},
    {"prefer": "prefill"},
    {"kv_shortage": "wait"},
    {"max_long_prefills": 1, "long_step_share": 0.2},
    {"batch_wait_ms": 400},
    {"batch_wait_ms": 2000, "max_seqs": 3},
]


def replayed(observed: Observed, trace: list[TraceRequest], clients: int = 0) -> Outcome:
    jobs = [
        Job(request.time, request.input_length, 0, request.output_length, request.output_length) for request in trace
    ]
    cost = CostModel.from_coefficients(COEFFICIENTS)
    return finish(Replay(Load(jobs, clients=clients), setup_of(observed.engine(), cost, 0.0)).run())


def assert_alike(outcome: Outcome, observed: Observed, *, within: float) -> None:
    found = {
        "ttft": outcome.ttft.mean,
        "ttft_p99": outcome.ttft.p99,
        "itl": outcome.itl.mean,
        "throughput": outcome.throughput,
    }
    for name, value in found.items():
        assert value == pytest.approx(observed.metrics[name], rel=within), name  # type: ignore[index]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("trace", "blocks"),
    [
        pytest.param(load(1, 80, 2, 200, 60), POOL, id="light"),
        pytest.param(load(2, 100, 20, 100, 60), POOL, id="overload"),
        pytest.param(load(3, 80, 3, 100, 60, long=4000, every=15), POOL, id="long prompts"),
        pytest.param(load(4, 80, 8, 200, 100), 300, id="few blocks"),
    ],
)
def test_a_replay_comes_to_what_the_core_comes_to(
    trace: list[TraceRequest], blocks: int, settings: dict[str, Any]
) -> None:
    observed = Observed(trace, SchedulerConfig(**settings), blocks)
    outcome = replayed(observed, trace)
    assert_alike(outcome, observed, within=0.1)
    if blocks == POOL:  # else it is a matter of who is preempted, and when
        assert outcome.itl.most == pytest.approx(observed.longest_gap, rel=0.5)


@pytest.mark.parametrize("prefer", ["mixed", "decode", "prefill"])
def test_the_window_sees_the_gaps_that_there_were(prefer: str) -> None:
    observed = Observed(load(7, 80, 4, 300, 40), SchedulerConfig(prefer=prefer), POOL)  # type: ignore[arg-type]
    seen = observed.facts().itl
    assert seen.mean == pytest.approx(observed.metrics["itl"], rel=0.02)
    assert seen.p99 == pytest.approx(observed.metrics["itl_p99"], rel=0.02)
    assert seen.most == pytest.approx(observed.longest_gap, rel=0.02)


def test_a_closed_loop_too() -> None:
    trace = load(5, 100, 1, 100, 60)
    observed = Observed(trace, SchedulerConfig(max_seqs=4), POOL, clients=10)
    at_once = [replace(request, time=0.0) for request in trace]
    outcome = replayed(observed, at_once, clients=10)
    assert_alike(outcome, observed, within=0.1)


@pytest.mark.parametrize("settings", [{"batch_wait_ms": 1000}, {"batch_wait_ms": 1000, "max_seqs": 2}], ids=str)
def test_an_idle_engine_waits_for_a_batch_to_fill(settings: dict[str, Any]) -> None:
    trace = load(6, 60, 0.7, 30, 10)
    observed = Observed(trace, SchedulerConfig(**settings), POOL)
    assert observed.metrics["ttft"] > 0.2, "most of it is the wait"
    assert_alike(replayed(observed, trace), observed, within=0.05)


def test_nothing_to_do_is_no_outcome() -> None:
    outcome = finish(Replay(Load([]), _setup()).run())
    assert outcome == Outcome(Spread(0.0, 0.0, 0.0), Spread(0.0, 0.0, 0.0), 0.0, 0.0, 0)


def test_who_waits_longer_than_others_did_counts_when_time_is_up() -> None:
    jobs = [Job(0.0, 10, 0, 1000, 1000), Job(0.0, 10, 0, 10, 10)]
    outcome = finish(Replay(Load(jobs, until=2.0), _setup(max_seqs=1)).run())
    assert outcome.ttft.p99 == outcome.ttft.most == pytest.approx(2.0)
    assert outcome.ttft.mean == pytest.approx((2.0 + 0.005 + 10 * 0.0009 + 50 * 0.6e-6) / 2)


def _setup(**settings: Any) -> Setup:
    engine = Observed(load(1, 2, 1, 10, 2), SchedulerConfig(**settings), POOL).engine()
    return setup_of(engine, CostModel.from_coefficients(COEFFICIENTS), 0.0)
