"""Prometheus metrics: histograms and counters of all frontends together, and the scheduler's own numbers.

Each frontend process keeps its values in files of one directory (prometheus-client's multiprocess mode), so that
whichever of them is asked answers with the sum. `PROMETHEUS_MULTIPROC_DIR` must be set before this module is imported.
The scheduler's numbers come from its latest `Stats` and are exposed once. Names follow vLLM's where it has one.
"""

import asyncio
import os
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ipc.messages import FinishReason
from ipc.stats_messages import Stats

from .histogram import TokenHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FLUSH_SECONDS = 0.5
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    5,
)
_LATENCY = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics:
    """The metrics of one frontend process. Times are in seconds."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._multiprocess_dir = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "from the request's arrival to a choice's first token", _FIRST_TOKEN
        )
        self.inter_token = TokenHistogram(
            "tokenmill:inter_token_latency_seconds",
            "time between two arrivals of tokens of one choice, divided by the tokens of the later one",
            _INTER_TOKEN,
            self._registry,
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "from the request's arrival to the end of its last choice", _LATENCY
        )
        self._success = Counter(
            "tokenmill:request_success", "choices that finished", ["finished_reason"], registry=self._registry
        )
        self._http = Counter(
            "tokenmill:http_requests", "HTTP requests answered", ["route", "status"], registry=self._registry
        )
        self._finished = {reason: self._success.labels(reason) for reason in ("stop", "length")}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tokenmill:{name}", text, buckets=buckets, registry=self._registry)

    def finished(self, reason: FinishReason) -> None:
        """Count a choice that finished."""
        self._finished[reason].inc()

    def http_request(self, route: str, status: int) -> None:
        """Count an answered request; `route` is the pattern, not the path."""
        self._http.labels(route, str(status)).inc()

    async def run(self) -> None:
        """Keep what other frontends can see of this one's numbers up to date."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            self.inter_token.flush()

    def _all_frontends(self) -> CollectorRegistry:
        if self._multiprocess_dir is None:
            return self._registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry, self._multiprocess_dir)  # type: ignore[no-untyped-call]
        return registry

    def histograms(self, *names: str) -> dict[str, dict[float, float]]:
        """By name of a histogram: its observations so far up to each bound in seconds. Reads files, like `render`."""
        buckets = {f"tokenmill:{name}_bucket": name for name in names}
        counts: dict[str, dict[float, float]] = {name: {} for name in names}
        for metric in self._all_frontends().collect():
            for sample in metric.samples:
                if sample.name in buckets:
                    counts[buckets[sample.name]][float(sample.labels["le"])] = sample.value
        return {name: dict(sorted(by_bound.items())) for name, by_bound in counts.items()}

    def render(self, stats: Stats | None) -> bytes:
        """Everything in Prometheus' text format. Reads files: not for the event loop."""
        text = generate_latest(self._all_frontends())
        if stats is not None:
            engine = CollectorRegistry()
            engine.register(_EngineCollector(stats))
            text += generate_latest(engine)
        return text


class _EngineCollector(Collector):
    """The scheduler's `Stats` as metrics."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        used = stats.blocks_total - stats.blocks_free - stats.blocks_unused
        for name, text, gauge in (
            ("num_requests_running", "requests that take part in steps", stats.running),
            ("num_requests_waiting", "requests that wait to run", stats.waiting),
            ("num_waiting_tokens", "prompt tokens of the requests that wait to run", stats.waiting_tokens),
            ("engine_ready", "1 while the ranks can compute, 0 while they are started again", int(stats.engine_ready)),
            ("kv_cache_usage_perc", "share of KV blocks in use by requests, 0 to 1", used / max(1, stats.blocks_total)),
            (
                "oldest_request_seconds",
                "longest time that a request has made no progress",
                stats.oldest_request_seconds,
            ),
            ("num_pinned_blocks", "cached KV blocks that requests have pinned", stats.pinned_blocks),
        ):
            yield GaugeMetricFamily(f"tokenmill:{name}", text, gauge)
        blocks = GaugeMetricFamily("tokenmill:kv_blocks", "KV blocks by state", labels=["state"])
        for state, count in block_counts(stats).items():
            if state != "total":
                blocks.add_metric([state], count)
        yield blocks
        host = GaugeMetricFamily("tokenmill:kv_host_blocks", "KV blocks in host memory by state", labels=["state"])
        host.add_metric(["used"], stats.host_blocks_used)
        host.add_metric(["free"], stats.host_blocks_total - stats.host_blocks_used)
        yield host
        for name, text, counter in (
            ("prompt_tokens", "prompt tokens admitted", stats.prompt_tokens),
            ("generation_tokens", "tokens generated", stats.generated_tokens),
            ("computed_tokens", "token positions computed, prefill and decode", stats.computed_tokens),
            ("prefill_tokens", "token positions computed of prompts, or anew", stats.prefill_tokens),
            ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", stats.prompt_tokens),
            ("prefix_cache_hits", "prompt tokens found in the prefix cache", stats.cached_tokens),
            ("num_preemptions", "times that a running request gave up its blocks", stats.preemptions),
            ("requests_finished", "requests that the scheduler finished", stats.finished),
            ("requests_aborted", "requests that the client gave up", stats.aborted),
            ("requests_refused", "requests that were refused at admission", stats.refused),
            (
                "requests_refused_deadline",
                "refused for a predicted miss of their TTFT target",
                stats.refused_deadline,
            ),
            ("loop_stops", "requests that ended because their output repeated itself", stats.loop_stops),
            (
                "num_recomputed_tokens",
                "computed before and lost to a preemption or a recovery",
                stats.recomputed_tokens,
            ),
            ("num_evicted_blocks", "cached KV blocks given up for good", stats.evicted_blocks),
            ("num_swapped_out_blocks", "KV blocks copied to host memory", stats.swapped_out_blocks),
            ("num_swapped_in_blocks", "KV blocks copied back from host memory", stats.swapped_in_blocks),
            ("engine_recoveries", "times that the ranks were started again and requests went on", stats.recoveries),
            ("engine_steps", "steps of the model", stats.step),
            ("device_busy_seconds", "time that the device spent in steps", stats.device_busy_seconds),
        ):
            yield CounterMetricFamily(f"tokenmill:{name}", text, counter)


def block_counts(stats: Stats) -> dict[str, int]:
    """KV blocks by state."""
    return {
        "free": stats.blocks_free,
        "cached": stats.blocks_cached,
        "private": stats.blocks_private,
        "in_transit": stats.blocks_in_transit,
        "total": stats.blocks_total,
    }
