"""Prometheus metrics: what the frontends count, all of them together, and the engine's own numbers.

Each frontend process keeps its values in files of one directory (prometheus-client's multiprocess mode), so that
whichever of them is asked answers with the sum. `PROMETHEUS_MULTIPROC_DIR` must be set before this module is imported.
The engine's numbers come from the scheduler's latest `Stats` and are exposed once. Names, labels and bounds of buckets
are those of vLLM where it has the same thing; further bounds lie between them, where this engine's times do.
"""

import asyncio
import os
import time
from collections.abc import Mapping

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from ipc.messages import Finished, FinishReason
from ipc.process_usage import watch_loop
from ipc.stats_messages import LAG_BOUNDS, Stats

from .engine_metrics import LOOP_LAG, LOOP_LAG_TEXT, PROCESS_CPU, PROCESS_CPU_TEXT, EngineCollector
from .exposition import Source, exposition
from .histogram import BatchedHistogram, Unmeasured

MAX_KEYS = 20  # API keys that are told apart in metrics
_FLUSH_SECONDS = 0.5
_SECONDS = (1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, *_SECONDS, 160, 640, 2560)
_INTER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *_SECONDS,
)
_LATENCY = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_CHOICES = (1, 2, 5, 10, 20)


class Identity(Struct, frozen=True, kw_only=True):
    """What a server's metrics say of it."""

    prefix: str = "tokenmill"
    model_name: str = ""
    max_model_len: int = 1 << 17  # tokens; buckets of lengths go as far
    keys: tuple[str, ...] = ()  # names of the API keys; the first `MAX_KEYS` are told apart
    process: str = "frontend-0"
    measures: bool = True  # False: there are no histograms of times
    cache_config: dict[str, str] = {}  # labels of `cache_config_info`


def length_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `longest` tokens."""
    return tuple(
        mantissa * 10**exponent
        for exponent in range(len(str(longest)))
        for mantissa in (1, 2, 5)
        if mantissa * 10**exponent <= longest
    )


class Metrics:
    """The metrics of one frontend process. Times are in seconds."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity = identity or Identity()
        self._registry = CollectorRegistry()
        self._multiprocess_dir = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self._batched: list[BatchedHistogram] = []
        self._keys = frozenset(identity.keys[:MAX_KEYS])
        self._by_source: dict[tuple[str, str], SourceMetrics] = {}
        lengths = length_buckets(identity.max_model_len)
        self.first_token = self._seconds(
            "time_to_first_token_seconds",
            "from the request's arrival to a choice's first token that has text; vLLM: to its first token",
            _FIRST_TOKEN,
        )
        self.inter_token = self._seconds(
            "inter_token_latency_seconds",
            "time between two arrivals of tokens of one choice, divided by the tokens of the later one",
            _INTER_TOKEN,
        )
        self.request_latency = self._seconds(
            "e2e_request_latency_seconds",
            "from the request's arrival to the end of its last choice; vLLM: of each choice",
            _LATENCY,
        )
        self._per_token = self._seconds(
            "request_time_per_output_token_seconds",
            "by choice: time from its first to its last token, divided by the tokens after the first",
            _INTER_TOKEN,
        )
        self._queue = self._seconds(
            "request_queue_time_seconds",
            "by choice: from its arrival at the scheduler to its first step; vLLM: after its last preemption",
            _LATENCY,
        )
        self._prefill = self._seconds(
            "request_prefill_time_seconds", "by choice: from its first step to its first token", _LATENCY
        )
        self._decode = self._seconds(
            "request_decode_time_seconds", "by choice: from its first to its last token", _LATENCY
        )
        self._inference = self._seconds(
            "request_inference_time_seconds", "by choice: from its first step to its last token", _LATENCY
        )
        self._prompt = self._histogram("request_prompt_tokens", "by choice: tokens of its prompt", lengths)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "by choice: tokens of its prompt that the prefix cache did not have",
            lengths,
        )
        self._generated = self._histogram(
            "request_generation_tokens", "by choice: tokens of its output, without what came behind a stop", lengths
        )
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "by request: tokens of its longest output", lengths
        )
        self._n = self._histogram("request_params_n", "by request: choices that it asked for", _CHOICES)
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "by request: max_tokens, of those that have one", lengths
        )
        self._success = Counter(
            "request_success",
            "choices that ended: stop, length; abort: the client left; error: the engine failed",
            ["finished_reason"],
            registry=self._registry,
        )
        self._http = Counter("http_requests", "HTTP requests answered", ["route", "status"], registry=self._registry)
        self._loop_lag: BatchedHistogram | None = None
        if identity.measures:
            lags = Histogram(LOOP_LAG, LOOP_LAG_TEXT, ["process"], buckets=LAG_BOUNDS, registry=self._registry)
            self._loop_lag = self._batch(lags.labels(identity.process))
        cpu = Counter(PROCESS_CPU, PROCESS_CPU_TEXT, ["process"], registry=self._registry)
        self._cpu = cpu.labels(identity.process)
        self._cpu_counted = 0.0  # seconds
        self._ended = {reason: self._success.labels(reason) for reason in ("stop", "length", "abort", "error")}
        source = ["route", "key"]
        self._output_tokens = Histogram(
            "output_tokens", "tokens of each choice's output", source, buckets=lengths, registry=self._registry
        )
        self._output_limits = Histogram(
            "output_max_tokens",
            "max_tokens of each choice whose request has one",
            source,
            buckets=lengths,
            registry=self._registry,
        )
        self._output_ends = Counter(
            "output_finishes", "choices by how they finished", [*source, "finished_reason"], registry=self._registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> BatchedHistogram:
        return self._batch(Histogram(name, text, buckets=buckets, registry=self._registry))

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> BatchedHistogram | Unmeasured:
        return self._histogram(name, text, buckets) if self._identity.measures else Unmeasured()

    def _batch(self, histogram: Histogram) -> BatchedHistogram:
        self._batched.append(BatchedHistogram(histogram))
        return self._batched[-1]

    def of(self, route: str, tenant: str) -> "SourceMetrics":
        """Where requests to `route`, with the API key of `tenant`, are counted."""
        key = tenant if tenant in self._keys else "other" if tenant else "none"
        source = self._by_source.get((route, key))
        if source is None:
            source = self._by_source[route, key] = SourceMetrics(
                self._batch(self._output_tokens.labels(route, key)),
                self._batch(self._output_limits.labels(route, key)),
                {reason: self._output_ends.labels(route, key, reason) for reason in ("stop", "length")},
            )
        return source

    def choice_finished(self, end: Finished) -> None:
        """Count a choice that finished."""
        self._ended[end.reason].inc()
        self._prompt.observe(end.prompt_tokens)
        self._computed.observe(end.prompt_tokens - end.cached_tokens)
        self._generated.observe(end.completion_tokens)
        times = None if end.timings is None else end.timings.scheduler
        if times is None or not times.first_scheduled:
            return
        self._queue.observe(times.first_scheduled - times.queued)
        if not times.first_token:
            return
        self._prefill.observe(times.first_token - times.first_scheduled)
        if times.last_token:
            self._decode.observe(times.last_token - times.first_token)
            self._inference.observe(times.last_token - times.first_scheduled)
            if end.completion_tokens > 1:
                self._per_token.observe((times.last_token - times.first_token) / (end.completion_tokens - 1))

    def choices_lost(self, count: int, *, failed: bool) -> None:
        """Count choices that had no end: the engine `failed`, or the client left."""
        self._ended["error" if failed else "abort"].inc(count)

    def request_finished(self, seconds: float, n: int, max_tokens: int | None, longest: int) -> None:
        """Count a request all of whose choices have finished; `longest`: tokens of the longest."""
        self.request_latency.observe(seconds)
        self._n.observe(n)
        self._longest.observe(longest)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def http_request(self, route: str, status: int) -> None:
        """Count an answered request; `route` is the pattern, not the path."""
        self._http.labels(route, str(status)).inc()

    async def run(self) -> None:
        """Keep what other frontends can see of this one's numbers up to date, and watch its event loop."""
        watching = None if self._loop_lag is None else asyncio.create_task(watch_loop(self._loop_lag.observe))
        try:
            while True:
                await asyncio.sleep(_FLUSH_SECONDS)
                self.flush()
        finally:
            if watching is not None:
                watching.cancel()

    def flush(self) -> None:
        """Hand on what was counted since the last time; on the event loop."""
        for histogram in self._batched:
            histogram.flush()
        before, self._cpu_counted = self._cpu_counted, time.process_time()
        self._cpu.inc(self._cpu_counted - before)

    def _all_frontends(self) -> CollectorRegistry:
        if self._multiprocess_dir is None:
            return self._registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry, self._multiprocess_dir)  # type: ignore[no-untyped-call]
        return registry

    def histograms(self, *names: str) -> dict[str, dict[float, float]]:
        """By name of a histogram: its observations so far up to each bound in seconds. Reads files, like `render`."""
        buckets = {f"{name}_bucket": name for name in names}
        counts: dict[str, dict[float, float]] = {name: {} for name in names}
        for metric in self._all_frontends().collect():
            for sample in metric.samples:
                if sample.name in buckets:
                    counts[buckets[sample.name]][float(sample.labels["le"])] = sample.value
        return {name: dict(sorted(by_bound.items())) for name, by_bound in counts.items()}

    def render(self, stats: Stats | None) -> bytes:
        """Everything in Prometheus' text format. Reads files: not for the event loop."""
        identity = self._identity
        sources: list[Source] = [self._all_frontends()]
        if stats is not None:
            sources.append(EngineCollector(stats, identity.cache_config))
        return exposition(sources, identity.prefix, {"model_name": identity.model_name, "engine": "0"})


class SourceMetrics:
    """How long the outputs are that one route and API key ask for, and get."""

    def __init__(
        self, tokens: BatchedHistogram, max_tokens: BatchedHistogram, ends: Mapping[FinishReason, Counter]
    ) -> None:
        self._tokens = tokens
        self._max_tokens = max_tokens
        self._ends = ends

    def choice_finished(self, end: Finished, max_tokens: int | None) -> None:
        self._tokens.observe(end.completion_tokens)
        self._ends[end.reason].inc()
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)
