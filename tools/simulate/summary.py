"""From what was observed to the numbers of the table. Definitions: section 8 of the design."""

from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from tools.reports.percentiles import Floats, percentile
from tools.simulate.observer import Observer, Status, means
from tools.simulate.simulator import Run

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count for goodput, in seconds."""

    ttft: float
    tpot: float


class Spread(Struct, frozen=True):
    """Percentiles in seconds; None where n does not support them."""

    n: int
    p50: float | None
    p90: float | None
    p99: float | None

    @staticmethod
    def of(values: Floats) -> "Spread":
        return Spread(len(values), *(percentile(values, percent) for percent in PERCENTILES))


class Latencies(Struct, frozen=True, kw_only=True):
    """Of one run, real or simulated. Seconds, and requests or tokens a second."""

    requests: int
    finished: int
    refused: int
    failed: int
    aborted: int
    seconds: float  # from the first arrival to the last output
    ttft: Spread
    itl: Spread
    tpot: Spread
    queue: Spread
    e2e: Spread
    slo_ttft: float
    slo_tpot: float
    met_slo: int
    goodput: float
    output_tokens: int
    output_throughput: float


class Summary(Struct, frozen=True, kw_only=True):
    """All numbers of one simulated run."""

    label: str
    latencies: Latencies
    prompt_tokens: int
    prompt_throughput: float
    kv_blocks: int
    kv_mean: float  # share of the pool that running requests refer to, over the time
    kv_peak: float
    hit_rate: float  # of prompt tokens
    infinite_hit_rate: float
    refused_deadline: int  # of the refused: predicted to miss their TTFT target
    preemptions: int
    recomputed_tokens: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    steps: int
    device_busy: float  # share of the time
    decisions: int
    decisions_per_second: float  # of real time
    real_seconds: float


def ttft(observer: Observer) -> Floats:
    """Of every request that got a token."""
    values = observer.first - observer.arrival
    return values[~np.isnan(values)]


def tpot(observer: Observer) -> Floats:
    """Of every finished request with at least two tokens."""
    chosen = (observer.status == Status.FINISHED) & (observer.num_tokens > 1)
    values: Floats = (observer.last - observer.first)[chosen] / (observer.num_tokens[chosen] - 1)
    return values


def latencies_of(observer: Observer, slo: Slo) -> Latencies:
    """Requests that a client aborted count neither as met nor as missed; refusals and failures are misses."""
    status = observer.status
    finished = status == Status.FINISHED
    first_seen = observer.first - observer.arrival
    later = np.maximum(observer.num_tokens - 1, 1)
    with np.errstate(invalid="ignore"):
        met = finished & (first_seen <= slo.ttft) & ((observer.last - observer.first) / later <= slo.tpot)
    waited = observer.started - observer.arrival
    begin = float(np.nanmin(observer.arrival)) if len(status) else 0.0
    seconds = max(0.0, observer.end - begin)
    tokens = int(observer.num_tokens.sum())
    return Latencies(
        requests=len(status),
        finished=int(finished.sum()),
        refused=int((status == Status.REFUSED).sum()),
        failed=int((status == Status.FAILED).sum()),
        aborted=int((status == Status.ABORTED).sum()),
        seconds=seconds,
        ttft=Spread.of(ttft(observer)),
        itl=Spread.of(observer.gaps),
        tpot=Spread.of(tpot(observer)),
        queue=Spread.of(waited[~np.isnan(waited)]),
        e2e=Spread.of((observer.last - observer.arrival)[finished]),
        slo_ttft=slo.ttft,
        slo_tpot=slo.tpot,
        met_slo=int(met.sum()),
        goodput=_rate(int(met.sum()), seconds),
        output_tokens=tokens,
        output_throughput=_rate(tokens, seconds),
    )


def summarize(run: Run, slo: Slo, infinite_hit_rate: float) -> Summary:
    stats, samples = run.stats, run.observer.samples
    latencies = latencies_of(run.observer, slo)
    end = run.simulated_seconds
    return Summary(
        label=run.setup.label,
        latencies=latencies,
        prompt_tokens=stats.prompt_tokens,
        prompt_throughput=_rate(stats.prompt_tokens, latencies.seconds),
        kv_blocks=run.setup.num_blocks,
        kv_mean=float(means(samples, "kv_share", end, 1)[0]) if end else 0.0,
        kv_peak=max((sample.kv_share for sample in samples), default=0.0),
        hit_rate=_rate(stats.cached_tokens, stats.prompt_tokens),
        infinite_hit_rate=infinite_hit_rate,
        refused_deadline=stats.refused_deadline,
        preemptions=stats.preemptions,
        recomputed_tokens=stats.recomputed_tokens,
        swapped_out_blocks=stats.swapped_out_blocks,
        swapped_in_blocks=stats.swapped_in_blocks,
        steps=run.steps,
        device_busy=_rate(run.busy_seconds, latencies.seconds),
        decisions=run.decisions,
        decisions_per_second=_rate(run.decisions, run.real_seconds),
        real_seconds=run.real_seconds,
    )


def _rate(amount: float, over: float) -> float:
    return amount / over if over else 0.0
