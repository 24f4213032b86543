"""Quantiles of the last moments, from histograms that count since the start."""

import math
from collections import deque

from msgspec import Struct

WINDOW = 30.0  # seconds
_LEAST = {0.5: 2, 0.9: 10}  # observations that a quantile takes to say anything


class Latency(Struct, frozen=True):
    """Seconds; None where there were too few observations."""

    count: int
    p50: float | None
    p90: float | None


class Window:
    """The difference between a histogram's counts now and `WINDOW` seconds ago."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, dict[float, float]]] = deque()

    def add(self, now: float, counts: dict[float, float]) -> Latency:
        """Take a reading in: observations up to each upper bound, in order; the last bound is infinite."""
        readings = self._readings
        readings.append((now, counts))
        while len(readings) > 2 and readings[1][0] <= now - WINDOW:
            readings.popleft()
        before = readings[0][1]
        recent = {bound: count - before.get(bound, 0.0) for bound, count in counts.items()}
        count = int(max(recent.values(), default=0.0))
        return Latency(count, _quantile(recent, 0.5), _quantile(recent, 0.9))


def _quantile(cumulative: dict[float, float], share: float) -> float | None:
    """Interpolated within its bucket, as Prometheus' histogram_quantile does it; the last bound at most."""
    total = max(cumulative.values(), default=0.0)
    if total < _LEAST[share]:
        return None
    rank = share * total
    lower = below = 0.0
    for bound, count in cumulative.items():
        if count >= rank:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower
