"""Predictions against what follows from queueing by hand, and the numbers they are made of."""

import math
from array import array

import msgspec
import numpy as np
import pytest

from config.schema import SchedulerConfig
from tools.loadgen.latencies import Latencies
from tools.loadgen.slo import Slo
from tools.simulate.costs import Outside, PlanShape, StepCost, Variation
from tools.simulate.traces import BlockPrompt, TraceRequest
from tools.tune.figures import figures
from tools.tune.predicting import Calibration, Prediction, predict, rate_of, rescaled, slowdown
from tools.tune.space import Candidate

STEP = 0.01  # seconds, whatever is in it
CALIBRATION = Calibration(
    cost=StepCost(STEP * 1e6, 0.0, 0.0, 0.0, 0.0),
    variation=Variation(),
    outside=Outside(arrive_us=3000.0, deliver_us=2000.0),
    steps=100,
    median_error=0.0,
    requests=10,
)


def trace(times: list[float], output: int = 5, prompt: int = 8) -> list[TraceRequest]:
    return [
        TraceRequest(time, BlockPrompt(array("q", [1000 * index + 1]), prompt, prompt), prompt, output)
        for index, time in enumerate(times)
    ]


def candidate(**settings: object) -> Candidate:
    plain = {"max_seqs": 64, "max_step_tokens": 512, "prefill_chunk": 512} | settings
    return Candidate(SchedulerConfig(**plain), 1000, 0, 512)  # type: ignore[arg-type]


def predicted(
    requests: list[TraceRequest], slo: Slo, chosen: Candidate | None = None, *, find_rate: bool = False
) -> Prediction:
    return predict(requests, chosen or candidate(), CALIBRATION, slo, find_rate=find_rate)


def test_a_request_alone_takes_its_steps_and_the_way() -> None:
    found = predicted(trace([0.0, 1.0, 2.0]), Slo(ttft=1.0))
    assert found.figures.ttft.p50 == pytest.approx(0.003 + STEP + 0.002)
    assert found.figures.itl.p50 == pytest.approx(STEP)
    assert found.figures.tpot.p50 == pytest.approx(STEP)
    assert found.busy == pytest.approx(3 * 5 * STEP / (2.0 + 0.003 + 5 * STEP))
    assert found.queue_p90 is None  # of three values


def test_who_comes_with_the_first_shares_the_third_step() -> None:
    """When the first request comes its prompt and its first decode step are planned; the others share the next step."""
    found = predicted(trace([0.0] * 8), Slo(ttft=0.034), candidate(max_step_tokens=64, prefill_chunk=64))
    assert found.figures.answered == 8
    assert found.figures.met == 1
    assert found.figures.strain == pytest.approx((0.005 + 3 * STEP) / 0.034)
    assert found.figures.ttft.p50 == pytest.approx(0.005 + 3 * STEP)


def test_the_highest_rate_is_that_of_a_full_server() -> None:
    """One request at a time, each of 5 steps. Up to 1 / (5 steps) nobody waits; beyond, each waits longer than the one
    before it by what is missing, and 90% are in time as long as request 179 (from 0) is.
    """
    requests = trace([0.5 * index for index in range(200)])
    found = predicted(requests, Slo(ttft=0.105), candidate(max_seqs=1), find_rate=True)
    assert found.highest_rate is not None
    spare = 0.105 - 0.005 - STEP
    assert found.highest_rate == pytest.approx(1 / (5 * STEP - spare / 179), rel=0.04)


def test_settings_that_never_meet_the_slo_have_no_rate() -> None:
    found = predicted(trace([0.0, 1.0, 2.0]), Slo(tpot=STEP / 2), find_rate=True)
    assert found.highest_rate is None
    assert found.figures.share == 0


def test_variation_reaches_the_tokens() -> None:
    calibration = Calibration(
        cost=CALIBRATION.cost,
        variation=Variation(prefill={4: [3.0]}, decode={1: [2.0]}),
        outside=Outside(),
        steps=1,
        median_error=0.0,
        requests=1,
    )
    found = predict(trace([0.0, 1.0]), candidate(), calibration, Slo(), find_rate=False)
    assert found.figures.ttft.p50 == pytest.approx(3 * STEP)
    assert found.figures.itl.p50 == pytest.approx(2 * STEP)


def some_steps(prefill: float, decode: float, number: int = 30) -> list[tuple[PlanShape, float]]:
    """So many of each kind, that took so many times as long as `CALIBRATION` says."""
    return [
        (PlanShape(8, 0, 0, 32.0, 1, 1, 0), prefill * STEP),
        (PlanShape(0, 1, 8, 0.0, 1, 1, 0), decode * STEP),
    ] * number


def test_costs_are_made_as_large_as_the_steps_before_say() -> None:
    """Prompts twice, decoding 1.5 times as slow as when it was calibrated; the way from the client is as it was."""
    steps = some_steps(2.0, 1.5)
    assert slowdown(CALIBRATION, steps) == pytest.approx(1.75)
    found = predict(trace([0.0, 1.0, 2.0]), candidate(), rescaled(CALIBRATION, steps), Slo(), find_rate=False)
    assert found.figures.ttft.p50 == pytest.approx(0.003 + 2 * STEP + 0.002)
    assert found.figures.itl.p50 == pytest.approx(1.5 * STEP)


def test_few_steps_of_a_kind_say_only_how_fast_all_are() -> None:
    few = some_steps(2.0, 1.0, 3)
    found = rescaled(CALIBRATION, few)
    for shape, _ in few:
        assert found.cost.seconds(shape, 0.0) * found.variation.mean(shape) == pytest.approx(1.5 * STEP)
    assert slowdown(CALIBRATION, []) == 1.0
    assert rescaled(CALIBRATION, []).cost == CALIBRATION.cost


def test_rescaling_keeps_how_steps_vary() -> None:
    """Rescaled by what was expected anyway it is the same calibration."""
    varied = msgspec.structs.replace(CALIBRATION, variation=Variation(prefill={4: [1.0, 3.0]}, decode={1: [0.5]}))
    found = rescaled(varied, some_steps(2.0, 0.5))
    assert found.cost == varied.cost
    assert found.variation == varied.variation


def latencies(ttft: float, gaps: list[float]) -> Latencies:
    return Latencies(
        ttft=ttft,
        tpot=float(np.mean(gaps)) if gaps else None,
        e2e=ttft + sum(gaps),
        icl=np.array(gaps),
        itl=np.array(gaps),
        tokens=len(gaps) + 1,
    )


def test_figures_by_hand() -> None:
    """Four of five sent were answered: 0.5 and 1.0 of the TTFT's limit, one misses TPOT by half, one has one token."""
    slo = Slo(ttft=1.0, tpot=0.1)
    answered = [
        latencies(0.5, [0.02, 0.04]),
        latencies(1.0, [0.1]),
        latencies(0.2, [0.1, 0.2]),
        latencies(0.1, []),
    ]
    found = figures(answered, 5, 2.0, slo)
    assert (found.requests, found.answered, found.met) == (5, 4, 3)
    assert found.share == pytest.approx(0.6)
    assert found.goodput == pytest.approx(1.2)
    assert found.share_low < 0.6 < found.share_high
    assert found.strain is None  # of 5, 90% are all of them, and one was not answered
    assert found.ttft.p50 == pytest.approx(0.35)
    assert found.itl.p50 == pytest.approx(0.1)


@pytest.mark.parametrize("strains", [[0.1] * 8 + [0.9, 3.0], [0.1] * 8 + [1.01, 3.0], [0.5] * 10])
def test_a_strain_of_one_is_an_attainment_of_ninety_percent(strains: list[float]) -> None:
    found = figures([latencies(strain, []) for strain in strains], 10, 1.0, Slo(ttft=1.0))
    assert found.strain == sorted(strains)[8]
    assert (found.strain <= 1) == (found.share >= 0.9)


def test_the_rate_is_of_the_gaps() -> None:
    assert rate_of(trace([0.0, 1.0, 4.0])) == pytest.approx(0.5)
    assert rate_of(trace([0.0, 0.0])) == 0.0
    assert math.isfinite(rate_of(trace([0.0])))
