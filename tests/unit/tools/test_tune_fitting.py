"""What calibration finds in the log of a server whose costs are known, since it was simulated."""

import random
from array import array
from pathlib import Path

import numpy as np
import pytest

from config.recordings import EVENT_LOG, create_recording
from config.schema import SchedulerConfig
from tools.loadgen.messages import Record
from tools.loadgen.runner import Run
from tools.loadgen.schedule import Schedule
from tools.loadgen.synthetic import TRACE_ARRIVALS
from tools.simulate.costs import PlanShape, StepCost, Variation, fit_variation
from tools.simulate.observer import Observer
from tools.simulate.replay import Replay, replay
from tools.simulate.simulator import Setup, Simulation
from tools.simulate.traces import BlockPrompt, TraceRequest
from tools.tune.calibrating import CalibrationError, alone, batch_sizes, fitted, more_alone, sizes_alone, together

COST = StepCost(5000.0, 300.0, 250.0, 0.5, 0.02)
ARRIVE, DELIVER = 0.004, 0.0015  # seconds


def recorded(path: Path, trace: list[TraceRequest], variation: Variation) -> tuple[Replay, Observer]:
    setup = Setup(
        label="",
        config=SchedulerConfig(max_seqs=16, max_step_tokens=512, prefill_chunk=512),
        num_blocks=2000,
        num_host_blocks=0,
        max_model_len=1024,
        batching="continuous",
        cost=COST,
        variation=variation,
    )
    with create_recording(EVENT_LOG, str(path), 1 << 20) as file:
        run = Simulation(trace, setup, log=file).run()
    return replay(path), run.observer


def some_trace(seed: int) -> list[TraceRequest]:
    """Alone and in bursts; some prompts are equally long."""
    rng = random.Random(seed)
    time = 0.0
    trace = []
    for index, length in enumerate(rng.choices(range(16, 600, 3), k=250)):
        prompt = BlockPrompt(array("q", [1000 * index + 1]), length, length)
        trace.append(TraceRequest(time, prompt, length, rng.randrange(2, 40)))
        time += rng.choice([0.0, 0.0, 0.05, 0.5])
    return trace


def client_run(trace: list[TraceRequest], observer: Observer) -> Run:
    """What a client saw that was so far away."""
    records = [
        Record(
            id=str(index),
            index=index,
            worker=0,
            scheduled=request.time - ARRIVE,
            sent=request.time - ARRIVE,
            ended=float(observer.last[index]) + DELIVER,
            outcome="ok",
            input_length=request.input_length,
            times=[float(observer.first[index]) + DELIVER, float(observer.last[index]) + DELIVER],
        )
        for index, request in enumerate(trace)
    ]
    return Run(Schedule([], TRACE_ARRIVALS, 0.0, 0.0), records, [], 0.0, 0.0, interrupted=False)


def test_known_costs_are_found_again(tmp_path: Path) -> None:
    trace = some_trace(1)
    log, observer = recorded(tmp_path / "events.log", trace, Variation())
    found = fitted([(log, [client_run(trace, observer)])])
    for name in ("fixed", "prefill_token", "decode_row", "context_token", "prefill_context"):
        assert getattr(found.cost, name) == pytest.approx(getattr(COST, name), rel=0.02), name
    assert found.median_error < 1e-3
    assert found.outside.arrive_us == pytest.approx(ARRIVE * 1e6, rel=1e-3)
    assert found.outside.deliver_us == pytest.approx(DELIVER * 1e6, rel=1e-3)
    every = [
        factor
        for part in (found.variation.prefill, found.variation.decode)
        for each in part.values()
        for factor in each
    ]
    assert every == pytest.approx([1.0] * len(every), abs=0.01)


def test_steps_that_vary_are_found_to_vary_as_much(tmp_path: Path) -> None:
    """Decoding takes 0.8 to 1.6 times as long as the cost says, evenly."""
    factors = np.linspace(0.8, 1.6, 33).tolist()
    log, observer = recorded(tmp_path / "events.log", some_trace(2), Variation(decode={1: factors}))
    trace = some_trace(2)
    found = fitted([(log, [client_run(trace, observer)])])
    shape = PlanShape(0, 4, 1200, 0.0, 4, 4, 0)
    drawn = [found.cost.seconds(shape, 0.0) * found.variation.draw(shape, random.Random(seed)) for seed in range(400)]
    truth = COST.seconds(shape, 0.0)
    for percent, factor in ((10, 0.88), (50, 1.2), (90, 1.52)):
        assert np.percentile(drawn, percent) == pytest.approx(truth * factor, rel=0.08), percent
    assert found.cost.seconds(shape, 0.0) * found.variation.mean(shape) == pytest.approx(truth * 1.2, rel=0.05)


def decode_steps(rows: int, factor: float, number: int) -> list[tuple[PlanShape, float]]:
    """Of a millisecond each, but for the factor."""
    return [(PlanShape(0, rows, 0, 0.0, rows, rows, 0), factor * 1e-3)] * number


def test_a_class_with_few_steps_is_filled_up_from_the_nearest_ones() -> None:
    """Of 3, 40 and 200 rows, with 20, 17 and 1 steps; the last takes all that it can from the middle one."""
    cost = StepCost(1000.0, 0.0, 0.0, 0.0, 0.0)
    steps = decode_steps(3, 2.0, 20) + decode_steps(40, 9.0, 17) + decode_steps(200, 5.0, 1)
    found = fit_variation(steps, cost)
    assert found.decode == {2: [2.0] * 20, 6: [2.0] * 2 + [5.0] + [9.0] * 17, 8: [2.0] * 2 + [5.0] + [9.0] * 17}
    assert found.prefill == {}
    assert found.draw(PlanShape(9, 0, 0, 0.0, 1, 1, 0), random.Random(0)) == 1.0
    # Where there are not so many steps at all, each class has all of them.
    few = fit_variation(decode_steps(40, 9.0, 3) + decode_steps(3, 2.0, 1), cost)
    assert few.decode == {size: [2.0, 9.0, 9.0, 9.0] for size in (2, 6)}


def test_a_class_takes_no_more_from_others_than_it_lacks() -> None:
    """19 own steps and the middle of a hundred: the neighbours do not outvote what was measured of its size."""
    cost = StepCost(1000.0, 0.0, 0.0, 0.0, 0.0)
    hundred = [step for part in range(100) for step in decode_steps(3, 1 + part / 100, 1)]
    found = fit_variation(hundred + decode_steps(40, 9.0, 19), cost)
    assert found.decode[6] == pytest.approx([1.495] + [9.0] * 19)
    assert len(found.decode[2]) == 50
    assert np.mean(found.decode[2]) == pytest.approx(1.495)


def test_what_cannot_be_fitted_is_said_in_a_line(tmp_path: Path) -> None:
    short = [TraceRequest(0.0, BlockPrompt(array("q", [1]), 20, 20), 20, 3)]
    log, observer = recorded(tmp_path / "a.log", short, Variation())
    with pytest.raises(CalibrationError, match="3 measured steps; at least 10 are needed"):
        fitted([(log, [client_run(short, observer)])])
    trace = some_trace(3)
    log, observer = recorded(tmp_path / "b.log", trace, Variation())
    with pytest.raises(CalibrationError, match="no request was answered"):
        fitted([(log, [])])
    log.difference = "event 3: step 1: rows differ"
    with pytest.raises(CalibrationError, match="schedules otherwise"):
        fitted([(log, [client_run(trace, observer)])])


def test_the_load_of_a_calibration() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(48) == [1, 2, 4, 8, 16, 32]
    assert batch_sizes(64)[-1] == 64
    lonely = [request.input_length for request in alone(1000)]
    assert len(lonely) == 13
    assert (lonely[0], max(lonely)) == (16, 1000)
    assert sorted(lonely) == lonely
    rng = np.random.default_rng(1)
    burst = [request.input_length for request in together(rng, 1000, 8, 4000)]
    assert len(burst) == 32
    assert 2000 < sum(burst) < 8000
    assert all(16 <= length <= 1000 for length in burst)
    assert {request.output_length for request in together(rng, 1000, 8, 4000)} == {8, 24, 40}
    # A model or trace of few tokens.
    tiny = [*alone(10), *more_alone(10), *together(rng, 10, 16, 1e6)]
    assert all(1 <= request.input_length <= 10 for request in tiny)


@pytest.mark.parametrize("longest", [10, 300, 8000])
def test_whenever_it_ends_the_lengths_have_shared_the_time(longest: int) -> None:
    """In tokens, 64 for the output: no length is behind another one by more than the next prompt of it."""
    spent = dict.fromkeys(sizes_alone(longest), 0)
    counts = dict.fromkeys(spent, 0)
    for request in more_alone(longest):
        spent[request.input_length] += request.input_length + 64
        counts[request.input_length] += 1
        for size in (size for size, count in counts.items() if count < 20):
            assert spent[size] + size >= max(spent[other] - 64 for other in spent if counts[other])
    assert set(counts.values()) == {20}
