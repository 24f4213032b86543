"""The engine's numbers, as the scheduler publishes them, as metrics."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ipc.stats_messages import LAG_BOUNDS, STEP_TOKEN_BOUNDS, Stats

# Frontends count these too, for themselves.
PROCESS_CPU, PROCESS_CPU_TEXT = "process_cpu_seconds", "CPU time of a process, all its threads"
LOOP_LAG, LOOP_LAG_TEXT = "event_loop_lag_seconds", "how late a process's event loop was, looked at ten times a second"


class EngineCollector(Collector):
    """The scheduler's `Stats` as metrics."""

    def __init__(self, stats: Stats, cache_config: Mapping[str, str]) -> None:
        """`cache_config`: labels of `cache_config_info`."""
        self._stats = stats
        self._cache_config = cache_config

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._steps()
        yield from self._processes()
        yield from self._tokenizers()

    def _gauges(self) -> Iterator[Metric]:
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
            yield GaugeMetricFamily(name, text, gauge)
        blocks = GaugeMetricFamily("kv_blocks", "KV blocks by state", labels=["state"])
        for state, count in block_counts(stats).items():
            if state != "total":
                blocks.add_metric([state], count)
        yield blocks
        host = GaugeMetricFamily("kv_host_blocks", "KV blocks in host memory by state", labels=["state"])
        host.add_metric(["used"], stats.host_blocks_used)
        host.add_metric(["free"], stats.host_blocks_total - stats.host_blocks_used)
        yield host
        info = GaugeMetricFamily("cache_config_info", "1, and how KV is kept", labels=list(self._cache_config))
        info.add_metric(list(self._cache_config.values()), 1)
        yield info

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        for name, text, counter in (
            (
                "prompt_tokens",
                "prompt tokens admitted; vLLM: computed, or found in its cache",
                stats.prompt_tokens,
            ),
            ("prompt_tokens_cached", "of those, tokens found in the prefix cache", stats.cached_tokens),
            ("generation_tokens", "tokens generated, those behind a stop string included", stats.generated_tokens),
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
            yield CounterMetricFamily(name, text, counter)

    def _steps(self) -> Iterator[Metric]:
        stats = self._stats
        yield _histogram(
            "iteration_tokens_total",
            "token positions that a step computed, prefill and decode",
            STEP_TOKEN_BOUNDS,
            stats.step_tokens,
            stats.computed_tokens,
        )
        limits = CounterMetricFamily(
            "steps_limited", "steps by what kept more out of them; nothing: there was no more", labels=["limit"]
        )
        for limit, steps in stats.limits:
            limits.add_metric([limit], steps)
        yield limits
        phases = CounterMetricFamily(
            "worker_seconds",
            "time of rank 0 by what it did; between: from one step to the next, to send, wait and read",
            labels=["phase"],
        )
        phases.add_metric(["prepare"], stats.prepare_seconds)
        phases.add_metric(["forward"], stats.forward_seconds)
        phases.add_metric(["sample"], stats.sample_seconds)
        phases.add_metric(["score"], stats.score_seconds)
        phases.add_metric(["between"], stats.between_seconds)
        yield phases
        idle = CounterMetricFamily(
            "engine_idle_seconds",
            "time without a step in flight, and whether there were requests",
            labels=["requests"],
        )
        idle.add_metric(["none"], stats.empty_seconds)
        idle.add_metric(["some"], stats.starved_seconds)
        yield idle

    def _processes(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily(PROCESS_CPU, PROCESS_CPU_TEXT, labels=["process"])
        lags = HistogramMetricFamily(LOOP_LAG, LOOP_LAG_TEXT, labels=["process"])
        for process in self._stats.processes:
            cpu.add_metric([process.name], process.cpu_seconds)
            if process.lags:
                lags.add_metric([process.name], _cumulative(LAG_BOUNDS, process.lags), process.lag_seconds)
        yield cpu
        if lags.samples:  # else nobody looks (--no-measure)
            yield lags

    def _tokenizers(self) -> Iterator[Metric]:
        works = self._stats.tokenizers
        waiting = sum(work.encoding for work in works)
        yield GaugeMetricFamily("tokenizer_encoding", "prompts that are being encoded, or wait for it", waiting)
        for name, text, counter in (
            ("tokenizer_prompts", "prompts encoded", sum(work.prompts for work in works)),
            ("tokenizer_encode_seconds", "time spent on encoding", sum(work.encode_seconds for work in works)),
            (
                "tokenizer_encode_wait_seconds",
                "time that prompts waited for a thread",
                sum(work.encode_wait_seconds for work in works),
            ),
            ("tokenizer_renders", "chat templates rendered", sum(work.renders for work in works)),
            (
                "tokenizer_render_seconds",
                "time in which chat templates were rendered, waiting for others included",
                sum(work.render_seconds for work in works),
            ),
            ("tokenizer_grammars", "grammars compiled, or refused", sum(work.grammars for work in works)),
            (
                "tokenizer_grammar_seconds",
                "time in which grammars were compiled, waiting for others included",
                sum(work.grammar_seconds for work in works),
            ),
            (
                "tokenizer_detokenize_seconds",
                "time spent on turning tokens into text",
                sum(work.detokenize_seconds for work in works),
            ),
        ):
            yield CounterMetricFamily(name, text, counter)


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts by bucket as Prometheus has them: by upper bound, each with those below it."""
    names = [*map(floatToGoString, map(float, bounds)), "+Inf"]
    return list(zip(names, accumulate(counts or [0] * len(names)), strict=True))


def _histogram(name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    return HistogramMetricFamily(name, text, buckets=_cumulative(bounds, counts), sum_value=total)


def block_counts(stats: Stats) -> dict[str, int]:
    """KV blocks by state."""
    return {
        "free": stats.blocks_free,
        "cached": stats.blocks_cached,
        "private": stats.blocks_private,
        "in_transit": stats.blocks_in_transit,
        "total": stats.blocks_total,
    }
