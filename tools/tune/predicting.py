"""What the simulator says of one combination of settings."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from tools.loadgen.latencies import Latencies
from tools.loadgen.rate_search import Probe, found, next_rate
from tools.loadgen.slo import Slo
from tools.reports.percentiles import percentile
from tools.simulate.costs import Outside, PlanShape, StepCost, Variation
from tools.simulate.observer import Observer, Status
from tools.simulate.simulator import Run, Setup, Simulation
from tools.simulate.traces import TraceRequest
from tools.traces import scaled_rate
from tools.tune.figures import ATTAINMENT, Figures, figures
from tools.tune.space import Candidate

_RATE_PRECISION = 0.03
_MOST_PROBES = 20
_FEWEST_STEPS = 20  # of a kind, that say how fast such steps are


class Calibration(Struct, frozen=True, kw_only=True):
    """What was measured of this server on this machine. `median_error` of the cost alone, as a share of a step."""

    cost: StepCost
    variation: Variation
    outside: Outside
    steps: Annotated[int, Meta(ge=0)]
    median_error: Annotated[float, Meta(ge=0)]
    requests: Annotated[int, Meta(ge=0)]  # from which `outside` comes


class Prediction(Struct, frozen=True, kw_only=True):
    """Of one run of the trace, and where its time goes.

    `highest_rate`: requests a second at which 90% still meet the SLO, where that was asked for and there is one.
    """

    figures: Figures
    highest_rate: float | None = None
    queue_p90: float | None  # seconds
    busy: float  # share of the time in which the device computes
    hit_rate: float  # of prompt tokens
    preemptions: int
    refused: int


def slowdown(calibration: Calibration, steps: Sequence[tuple[PlanShape, float]]) -> float:
    """How many times as long as was to be expected these steps (and their seconds) took, all together; 1 of none."""
    cost, variation = calibration.cost, calibration.variation
    expected = sum(cost.seconds(shape, 0.0) * variation.mean(shape) for shape, _ in steps)
    return sum(seconds for _, seconds in steps) / expected if expected else 1.0


def rescaled(calibration: Calibration, steps: Sequence[tuple[PlanShape, float]]) -> Calibration:
    """The same machine when it was as fast as these steps say that it was.

    Steps with prompt tokens and those that only decode, each have a factor of their own: other work on the machine
    does not slow both down alike. Too few of a kind take the factor of all.
    """
    overall = slowdown(calibration, steps)
    kinds = []
    for is_prefill in (True, False):
        kind = [step for step in steps if (step[0].prefill_tokens > 0) == is_prefill]
        kinds.append(slowdown(calibration, kind) / overall if len(kind) >= _FEWEST_STEPS else 1.0)
    return msgspec.structs.replace(
        calibration, cost=calibration.cost.times(overall), variation=calibration.variation.times(*kinds)
    )


def rate_of(requests: Sequence[TraceRequest]) -> float:
    """Requests a second: n arrivals are n - 1 gaps."""
    span = requests[-1].time - requests[0].time
    return (len(requests) - 1) / span if span > 0 else 0.0


def predict(
    trace: list[TraceRequest], candidate: Candidate, calibration: Calibration, slo: Slo, *, find_rate: bool
) -> Prediction:
    """Simulate the trace as it is; with `find_rate` also faster and slower, to find the highest rate."""
    run = _simulate(trace, candidate, calibration)
    observer, stats = run.observer, run.stats
    waited = observer.started - observer.arrival
    seconds = observer.end - float(observer.arrival.min())
    return Prediction(
        figures=_figures(run, trace, calibration, slo),
        highest_rate=_highest_rate(trace, candidate, calibration, slo) if find_rate else None,
        queue_p90=percentile(waited[~np.isnan(waited)], 90),
        busy=run.busy_seconds / seconds if seconds > 0 else 0.0,
        hit_rate=stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
        preemptions=stats.preemptions,
        refused=int((observer.status == Status.REFUSED).sum()),
    )


def _simulate(trace: list[TraceRequest], candidate: Candidate, calibration: Calibration) -> Run:
    setup = Setup(
        label="",
        config=candidate.config,
        num_blocks=candidate.num_blocks,
        num_host_blocks=candidate.num_host_blocks,
        max_model_len=candidate.max_model_len,
        batching="continuous",
        cost=calibration.cost,
        variation=calibration.variation,
        outside=calibration.outside,
        warm=True,
    )
    return Simulation(trace, setup).run()


def _figures(run: Run, trace: Sequence[TraceRequest], calibration: Calibration, slo: Slo) -> Figures:
    answered = client_latencies(run.observer, calibration.outside.deliver_us / 1e6)
    return figures(answered, len(trace), rate_of(trace), slo)


def client_latencies(observer: Observer, delivery: float) -> list[Latencies]:
    """Of the requests that finished, as a client sees them, who gets each token `delivery` seconds later."""
    finished = np.flatnonzero(observer.status == Status.FINISHED)
    gaps = observer.gaps_by_request()
    found = []
    for number in finished.tolist():
        arrival, first, last = (float(times[number]) for times in (observer.arrival, observer.first, observer.last))
        tokens = int(observer.num_tokens[number])
        found.append(
            Latencies(
                ttft=first - arrival + delivery,
                tpot=(last - first) / (tokens - 1) if tokens > 1 else None,
                e2e=last - arrival + delivery,
                icl=gaps[number],
                itl=gaps[number],
                tokens=tokens,
            )
        )
    return found


def _highest_rate(trace: list[TraceRequest], candidate: Candidate, calibration: Calibration, slo: Slo) -> float | None:
    """As the load generator's `--find-rate`, but of the whole trace at each rate."""
    given = rate_of(trace)
    probes: list[Probe] = []
    while len(probes) < _MOST_PROBES:
        rate = next_rate(probes, ATTAINMENT, given, _RATE_PRECISION)
        if rate is None:
            break
        faster = scaled_rate(trace, rate / given)
        part = _figures(_simulate(faster, candidate, calibration), faster, calibration, slo)
        probes.append(Probe(rate, part.share, part.share_low, part.share_high, part.goodput, part.requests, void=False))
    return found(probes, ATTAINMENT).rate
