"""A Prometheus histogram for values that come with every token."""

from bisect import bisect_left

from prometheus_client import CollectorRegistry, Histogram


class TokenHistogram:
    """Counts in plain integers, and hands them on now and then.

    `Histogram.observe` writes to a mapped file twice for each value: a third of the time that a streamed token costs.
    """

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._histogram = Histogram(name, text, buckets=buckets, registry=registry)
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value; it is exported after the next `flush`."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        """Hand on what was counted since the last time."""
        # prometheus-client has no public way to add several values at once.
        for bucket, count in zip(self._histogram._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._histogram._sum.inc(self._sum)
        self._counts = [0] * len(self._counts)
        self._sum = 0.0
