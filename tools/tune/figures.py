"""What a run of the trace comes to: the same numbers, by the same functions, of a simulation and of a real server."""

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from tools.loadgen.latencies import Latencies
from tools.loadgen.slo import Slo
from tools.reports.percentiles import percentile, share_interval

ATTAINMENT = 0.9  # share of the requests that must meet the SLO


class Quantiles(Struct, frozen=True):
    """Seconds; None where there are too few values."""

    p50: float | None
    p90: float | None

    @staticmethod
    def of(values: Sequence[float]) -> "Quantiles":
        found = np.array(values)
        return Quantiles(percentile(found, 50), percentile(found, 90))


class Figures(Struct, frozen=True, kw_only=True):
    """Of all requests of a run; those that were refused or failed are misses.

    `share` met the SLO, between `share_low` and `share_high` with 95%; `goodput` is that share of the offered rate, in
    requests a second. `strain`: what 90% of the requests are within, where a request's strain is its largest latency as
    a share of its limit; None where more than 10% have none. At most 1 means the same as a share of 90%.
    """

    requests: int
    answered: int
    met: int
    share: float
    share_low: float
    share_high: float
    goodput: float
    strain: float | None
    ttft: Quantiles
    itl: Quantiles
    tpot: Quantiles


def figures(answered: Sequence[Latencies], requests: int, rate: float, slo: Slo) -> Figures:
    """`requests`: all that were sent, at `rate` a second."""
    met = sum(slo.met(latencies) for latencies in answered)
    interval = share_interval(met, requests)
    strains = sorted(slo.strain(latencies) for latencies in answered)
    needed = math.ceil(ATTAINMENT * requests)
    return Figures(
        requests=requests,
        answered=len(answered),
        met=met,
        share=met / requests,
        share_low=interval.low or 0.0,
        share_high=interval.high or 0.0,
        goodput=rate * met / requests,
        strain=strains[needed - 1] if needed <= len(strains) else None,
        ttft=Quantiles.of([latencies.ttft for latencies in answered]),
        itl=Quantiles.of([gap for latencies in answered for gap in latencies.itl]),
        tpot=Quantiles.of([latencies.tpot for latencies in answered if latencies.tpot is not None]),
    )
