"""Metrics as Prometheus reads them: with the server's prefix, and labels that all of them have."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Source = Collector | CollectorRegistry


class _Labelled(Collector):
    def __init__(self, sources: Sequence[Source], prefix: str, labels: Mapping[str, str]) -> None:
        self._sources = sources
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        named: dict[str, Metric] = {}  # what several sources have is still one metric
        for metric in (metric for source in self._sources for metric in source.collect()):
            renamed = named.setdefault(
                metric.name, Metric(f"{self._prefix}:{metric.name}", metric.documentation, metric.type)
            )
            renamed.samples += [
                sample._replace(name=f"{self._prefix}:{sample.name}", labels={**self._labels, **sample.labels})
                for sample in metric.samples
            ]
        return named.values()


def exposition(sources: Sequence[Source], prefix: str, labels: Mapping[str, str]) -> bytes:
    """All metrics of `sources` in Prometheus' text format, each named PREFIX:NAME, with `labels` added to its own."""
    registry = CollectorRegistry()
    registry.register(_Labelled(sources, prefix, labels))
    return generate_latest(registry)
