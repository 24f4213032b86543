"""Whether the load generator itself was the bottleneck: how late it sent and looked, and what it took of its cores.

Times are seconds from the start of the run.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from tools.reports.percentiles import Floats, percentile

_FEW = 2  # late requests that may be anything


class Limits(Struct, frozen=True):
    """Beyond which a run is void; seconds, and a share of a core.

    `send_lag`: for more than 1% of the requests, and three of them; `loop_lag`: for more than 1% of the time that
    requests were on their way; `cpu`: mean over that time.
    """

    send_lag: float = 0.02
    loop_lag: float = 0.02
    cpu: float = 0.8


class Lag(Struct, frozen=True):
    """Seconds. `p99`: of fewer than 100 values the largest."""

    p50: float
    p99: float
    max: float


class ClientLoad(Struct, frozen=True):
    """Of all worker processes. `cpu` and `cpu_peak`: a share of a core for each of them."""

    send_lag: Lag
    loop_lag: Lag
    cpu: list[float]
    cpu_peak: list[float]
    void: list[str]  # reasons; empty: the run counts


class WorkerLoad(Struct):
    """What one worker has told.

    `ticks`: when each look of a timer of period `tick` was, and how late. `cpu`: from when to when it took which share
    of a core.
    """

    ticks: list[tuple[float, float]]
    tick: float
    cpu: list[tuple[float, float, float]]


class Flights:
    """When requests were on their way. The client matters then, and the more of them there are, the more it does."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        """From when to when each one was."""
        ends = np.array(spans).reshape(-1, 2)
        moments = np.concatenate(ends.T)
        order = np.argsort(moments, kind="stable")
        self._moments: Floats = moments[order]
        number = np.cumsum(np.repeat([1.0, -1.0], len(ends))[order])
        self._until: Floats = np.concatenate([[0.0], np.cumsum(number[:-1] * np.diff(self._moments))])
        self.seconds = float(self._until[-1]) if len(ends) else 0.0  # of all of them together

    def within(self, begin: Floats, end: Floats) -> Floats:
        """Seconds of all requests together in each span of time."""
        if not len(self._moments):
            return np.zeros(len(begin))
        return np.interp(end, self._moments, self._until) - np.interp(begin, self._moments, self._until)


def send_lags(values: Floats) -> Lag:
    """Of how long after its due time each request was sent."""
    if not len(values):
        return Lag(0.0, 0.0, 0.0)
    largest = float(values.max())
    p99 = percentile(values, 99)
    return Lag(float(np.median(values)), largest if p99 is None else p99, largest)


def waits(lags: Floats, tick: float, weights: Floats) -> Lag:
    """Of what a message would wait that came at a moment drawn from the time, in which the moments of each tick count
    by its weight.

    A timer of period `tick` that was late by L has seen the loop busy for L: whatever came meanwhile waited, the first
    for L and the last for nothing. So the share of time with a wait above x is the sum of max(0, L - x) over the whole;
    one stall of a second counts a hundred times as much as one of ten milliseconds.
    """
    counted = weights > 0
    if not counted.any():
        return Lag(0.0, 0.0, 0.0)
    order = np.argsort(-lags[counted], kind="stable")
    ordered, weights = lags[counted][order], weights[counted][order]
    total = float((weights * (tick + ordered)).sum())
    sums, sizes = np.cumsum(weights * ordered), np.cumsum(weights)

    def exceeded(share: float) -> float:
        # With those above x: sum of weight * (lag - x) = share of the total.
        return max(0.0, float(((sums - share * total) / sizes).max()))

    return Lag(exceeded(0.5), exceeded(0.01), float(ordered[0]))


def _looping(worker: WorkerLoad, flights: Flights) -> Lag:
    if not worker.ticks:
        return Lag(0.0, 0.0, 0.0)
    seen, lags = np.array(worker.ticks).T
    spans = worker.tick + lags
    return waits(lags, worker.tick, flights.within(seen - spans, seen) / spans)


def _cpu(worker: WorkerLoad, flights: Flights) -> tuple[float, float]:
    """Mean and peak."""
    if not worker.cpu:
        return 0.0, 0.0
    begin, end, shares = np.array(worker.cpu).T
    weights = flights.within(begin, end)
    if not (weights > 0).any():
        return 0.0, 0.0
    return float(np.average(shares, weights=weights)), float(shares[weights > 0].max())


def client_load(lags: Floats, flights: Flights, workers: Sequence[WorkerLoad], limits: Limits) -> ClientLoad:
    """`lags`: of the measured requests' sending; `flights`: theirs."""
    sending = send_lags(lags)
    looping = [_looping(worker, flights) for worker in workers]
    worst = max(looping, key=lambda lag: lag.p99, default=Lag(0.0, 0.0, 0.0))
    found = [_cpu(worker, flights) for worker in workers]
    cpu = [mean for mean, _ in found]
    void = []
    late = int((lags > limits.send_lag).sum())
    if late > max(_FEW, 0.01 * len(lags)):
        void.append(
            f"{late:,} of {len(lags):,} requests were sent more than {limits.send_lag * 1e3:g} ms late: p99 "
            f"{sending.p99 * 1e3:.1f} ms"
        )
    if worst.p99 > limits.loop_lag:
        void.append(
            f"a worker process looked late at what came: p99 {worst.p99 * 1e3:.1f} ms, "
            f"limit {limits.loop_lag * 1e3:g} ms"
        )
    if max(cpu, default=0.0) > limits.cpu:
        void.append(f"a worker process used {max(cpu):.0%} of a core, limit {limits.cpu:.0%}: use more --processes")
    return ClientLoad(sending, worst, cpu, [peak for _, peak in found], void)
