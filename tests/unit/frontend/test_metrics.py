"""What frontends count, and the engine's numbers, as Prometheus metrics."""

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from frontend.metrics import MAX_KEYS, Identity, Metrics, length_buckets
from ipc.messages import ChoiceTimings, Finished, Timings
from ipc.stats_messages import ProcessUsage, Stats, TokenizerWork
from tests.exposition import value

STATS = Stats(
    time=1.0,
    step=1,
    running=2,
    waiting=3,
    blocks_total=100,
    blocks_free=50,
    blocks_cached=20,
    blocks_private=29,
    blocks_in_transit=1,
    prompt_tokens=4,
    cached_tokens=5,
    computed_tokens=6,
    generated_tokens=7,
    preemptions=8,
    finished=9,
    aborted=10,
    refused=11,
    oldest_request_seconds=1.5,
    engine_ready=False,
    recoveries=12,
    waiting_tokens=13,
    refused_deadline=14,
    recomputed_tokens=15,
    evicted_blocks=16,
    swapped_out_blocks=17,
    swapped_in_blocks=18,
    host_blocks_total=40,
    host_blocks_used=19,
    pinned_blocks=21,
    loop_stops=22,
    step_tokens=(3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1),
    limits=(("nothing", 4), ("kv_blocks", 2)),
    prepare_seconds=0.5,
    forward_seconds=2.0,
    sample_seconds=0.25,
    score_seconds=0.125,
    between_seconds=4.0,
    empty_seconds=8.0,
    starved_seconds=1.0,
    processes=(
        ProcessUsage("scheduler", 1.5, (4, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0), 0.25),
        ProcessUsage("worker-0", 90.5),
    ),
    tokenizers=(
        TokenizerWork(2, 10, 0.5, 0.25, 6, 0.75, 3, 1.5, 2.5),
        TokenizerWork(1, 20, 1.0, 0.5, 4, 0.25, 1, 0.5, 1.5),
    ),
)
TIMINGS = Timings(
    clock_offset=0.0,
    received=9.0,
    tokenized=9.5,
    finished=20.0,
    scheduler=ChoiceTimings(queued=10.0, first_scheduled=10.25, first_token=12.25, last_token=14.75, steps=6),
)
END = Finished(1, 0, "length", None, 40, 6, 32, timings=TIMINGS)
SERVER = Identity(prefix="vllm", model_name="org/tiny", max_model_len=1000, keys=("search", "chat"))


def text(metrics: Metrics, stats: Stats | None = None) -> str:
    metrics.flush()
    return metrics.render(stats).decode()


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("engine_ready", {}, 0),
        ("num_waiting_tokens", {}, 13),
        ("num_pinned_blocks", {}, 21),
        ("kv_host_blocks", {"state": "used"}, 19),
        ("kv_host_blocks", {"state": "free"}, 21),
        ("engine_recoveries_total", {}, 12),
        ("requests_refused_total", {}, 11),
        ("requests_refused_deadline_total", {}, 14),
        ("num_recomputed_tokens_total", {}, 15),
        ("num_evicted_blocks_total", {}, 16),
        ("num_swapped_out_blocks_total", {}, 17),
        ("num_swapped_in_blocks_total", {}, 18),
        ("loop_stops_total", {}, 22),
        ("iteration_tokens_total_bucket", {"le": "1.0"}, 3),
        ("iteration_tokens_total_bucket", {"le": "16384.0"}, 5),
        ("iteration_tokens_total_bucket", {"le": "+Inf"}, 6),
        ("iteration_tokens_total_sum", {}, 6),
        ("steps_limited_total", {"limit": "kv_blocks"}, 2),
        ("worker_seconds_total", {"phase": "forward"}, 2),
        ("worker_seconds_total", {"phase": "between"}, 4),
        ("engine_idle_seconds_total", {"requests": "some"}, 1),
        ("engine_idle_seconds_total", {"requests": "none"}, 8),
        ("process_cpu_seconds_total", {"process": "worker-0"}, 90.5),
        ("event_loop_lag_seconds_bucket", {"process": "scheduler", "le": "0.1"}, 4),
        ("event_loop_lag_seconds_bucket", {"process": "scheduler", "le": "0.25"}, 5),
        ("event_loop_lag_seconds_sum", {"process": "scheduler"}, 0.25),
        ("tokenizer_encoding", {}, 3),
        ("tokenizer_prompts_total", {}, 30),
        ("tokenizer_encode_seconds_total", {}, 1.5),
        ("tokenizer_encode_wait_seconds_total", {}, 0.75),
        ("tokenizer_renders_total", {}, 10),
        ("tokenizer_render_seconds_total", {}, 1),
        ("tokenizer_grammars_total", {}, 4),
        ("tokenizer_grammar_seconds_total", {}, 2),
        ("tokenizer_detokenize_seconds_total", {}, 4),
    ],
)
def test_each_number_of_the_engine_has_its_name(name: str, labels: dict[str, str], expected: float) -> None:
    assert value(text(Metrics(), STATS), f"tokenmill:{name}", **labels) == expected


def test_kv_blocks_add_up_to_the_total() -> None:
    assert value(text(Metrics(), STATS), "tokenmill:kv_blocks") == STATS.blocks_total


def test_each_metric_is_there_once_with_the_prefix_and_the_model() -> None:
    metrics = Metrics(SERVER)
    metrics.choice_finished(END)
    families = list(text_string_to_metric_families(text(metrics, STATS)))
    names = [family.name for family in families]
    assert len(names) == len(set(names)) > 40
    for family in families:
        assert family.documentation
        for sample in family.samples:
            assert sample.name.startswith("vllm:")
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("org/tiny", "0")


# Types and bounds that vLLM 0.29 exports, of what dashboards made for it ask for.
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # with a context of 1000
LATENCIES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
VLLM: dict[str, tuple[str, tuple[float, ...]]] = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "kv_cache_usage_perc": ("gauge", ()),
    "cache_config_info": ("gauge", ()),
    "prefix_cache_queries": ("counter", ()),
    "prefix_cache_hits": ("counter", ()),
    "num_preemptions": ("counter", ()),
    "prompt_tokens": ("counter", ()),
    "prompt_tokens_cached": ("counter", ()),
    "generation_tokens": ("counter", ()),
    "request_success": ("counter", ()),
    "time_to_first_token_seconds": ("histogram", (*FIRST, 2560)),
    "inter_token_latency_seconds": ("histogram", GAPS),
    "request_time_per_output_token_seconds": ("histogram", GAPS),
    "e2e_request_latency_seconds": ("histogram", LATENCIES),
    "request_queue_time_seconds": ("histogram", LATENCIES),
    "request_inference_time_seconds": ("histogram", LATENCIES),
    "request_prefill_time_seconds": ("histogram", LATENCIES),
    "request_decode_time_seconds": ("histogram", LATENCIES),
    "request_prompt_tokens": ("histogram", LENGTHS),
    "request_generation_tokens": ("histogram", LENGTHS),
    "request_prefill_kv_computed_tokens": ("histogram", LENGTHS),
    "request_max_num_generation_tokens": ("histogram", LENGTHS),
    "request_params_max_tokens": ("histogram", LENGTHS),
    "request_params_n": ("histogram", (1, 2, 5, 10, 20)),
    "iteration_tokens_total": ("histogram", (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)),
}


def test_dashboards_made_for_vllm_find_its_names_types_and_bounds() -> None:
    families = {family.name: family for family in text_string_to_metric_families(text(Metrics(SERVER), STATS))}
    for name, (kind, bounds) in VLLM.items():
        family = families[f"vllm:{name}"]
        assert family.type == kind, name
        ours = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}
        assert ours >= set(bounds), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("request_queue_time_seconds", 0.25),
        ("request_prefill_time_seconds", 2.0),
        ("request_decode_time_seconds", 2.5),
        ("request_inference_time_seconds", 4.5),
        ("request_time_per_output_token_seconds", 0.5),
        ("request_prompt_tokens", 40),
        ("request_prefill_kv_computed_tokens", 8),
        ("request_generation_tokens", 6),
    ],
)
def test_a_finished_choice_is_counted_by_its_timeline(name: str, expected: float) -> None:
    metrics = Metrics(SERVER)
    metrics.choice_finished(END)
    exported = text(metrics)
    assert value(exported, f"vllm:{name}_sum") == expected
    assert value(exported, f"vllm:{name}_count") == 1
    assert value(exported, "vllm:request_success_total", finished_reason="length") == 1


@pytest.mark.parametrize(
    ("times", "counted"),
    [
        (None, set()),
        (ChoiceTimings(queued=1.0), set()),
        (ChoiceTimings(queued=1.0, first_scheduled=2.0), {"queue"}),
        (ChoiceTimings(queued=1.0, first_scheduled=2.0, first_token=3.0), {"queue", "prefill"}),
    ],
)
def test_what_a_choice_never_came_to_is_not_counted(times: ChoiceTimings | None, counted: set[str]) -> None:
    timings = None if times is None else Timings(0.0, 0.0, 0.0, 0.0, times)
    metrics = Metrics()
    metrics.choice_finished(Finished(1, 0, "stop", None, 4, 1, 0, timings=timings))
    exported = text(metrics)
    for phase in ("queue", "prefill", "decode", "inference"):
        assert value(exported, f"tokenmill:request_{phase}_time_seconds_count") == (phase in counted), phase


def test_lengths_are_told_apart_by_route_and_key() -> None:
    metrics = Metrics(SERVER)
    metrics.of("/v1/completions", "search").choice_finished(END, 6)
    metrics.of("/v1/completions", "search").choice_finished(END, None)
    metrics.of("/v1/completions", "").choice_finished(END, 50)
    for stranger in ("0123", "4567"):
        metrics.of("/v1/chat/completions", stranger).choice_finished(END, 50)
    exported = text(metrics)
    completions = "/v1/completions"
    assert value(exported, "vllm:output_tokens_sum", route=completions, key="search") == 12
    assert value(exported, "vllm:output_max_tokens_count", route=completions, key="search") == 1
    assert value(exported, "vllm:output_max_tokens_sum", key="none") == 50
    assert value(exported, "vllm:output_finishes_total", key="other", finished_reason="length") == 2
    assert value(exported, "vllm:output_finishes_total", key="other", finished_reason="stop") == 0


def test_the_keys_that_are_told_apart_are_few() -> None:
    keys = tuple(f"team-{number}" for number in range(MAX_KEYS + 5))
    metrics = Metrics(Identity(keys=keys))
    for key in keys:
        metrics.of("/v1/completions", key).choice_finished(END, None)
    families = {family.name: family for family in text_string_to_metric_families(text(metrics))}
    shown = {sample.labels["key"] for sample in families["tokenmill:output_tokens"].samples}
    assert shown == {*keys[:MAX_KEYS], "other"}


@pytest.mark.parametrize("longest", [1, 16, 999, 1000, 131072])
def test_length_buckets_are_of_1_2_5_and_go_up_to_the_longest(longest: int) -> None:
    buckets = length_buckets(longest)
    assert buckets[0] == 1
    assert longest / 2.5 <= buckets[-1] <= longest
    assert {str(bound).rstrip("0") for bound in buckets} <= {"1", "2", "5"}
    assert list(buckets) == sorted(set(buckets))


def test_without_measuring_there_are_counts_and_no_times() -> None:
    def families(measures: bool) -> set[str]:
        metrics = Metrics(Identity(measures=measures))
        metrics.choice_finished(END)
        metrics.request_finished(1.0, 1, 6, 6)
        metrics.first_token.observe(0.5)
        metrics.inter_token.observe(0.25)
        metrics.flush()
        exported = text(metrics, structs.replace(STATS, processes=()))
        names = {family.name for family in text_string_to_metric_families(exported) if family.samples}
        return {name for name in names if not name.endswith("_created")}

    gone = families(True) - families(False)
    assert gone == {
        f"tokenmill:{name}_seconds"
        for name in (
            "time_to_first_token",
            "inter_token_latency",
            "e2e_request_latency",
            "request_time_per_output_token",
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "request_inference_time",
            "event_loop_lag",
        )
    }
    assert families(False) < families(True)
    assert "tokenmill:request_generation_tokens" in families(False)
