"""The scheduler's numbers as Prometheus metrics."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from frontend.metrics import Metrics
from ipc.stats_messages import Stats

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
)


def exported() -> dict[str, tuple[str, float]]:
    """Type and value of each sample, under its name and labels."""
    families = text_string_to_metric_families(Metrics().render(STATS).decode())
    return {
        ",".join([sample.name, *sample.labels.values()]): (family.type, sample.value)
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("engine_ready", "gauge", 0),
        ("num_waiting_tokens", "gauge", 13),
        ("num_pinned_blocks", "gauge", 21),
        ("kv_host_blocks,used", "gauge", 19),
        ("kv_host_blocks,free", "gauge", 21),
        ("engine_recoveries_total", "counter", 12),
        ("requests_refused_total", "counter", 11),
        ("requests_refused_deadline_total", "counter", 14),
        ("num_recomputed_tokens_total", "counter", 15),
        ("num_evicted_blocks_total", "counter", 16),
        ("num_swapped_out_blocks_total", "counter", 17),
        ("num_swapped_in_blocks_total", "counter", 18),
        ("loop_stops_total", "counter", 22),
    ],
)
def test_each_number_has_its_name_and_type(name: str, kind: str, value: float) -> None:
    assert exported()[f"tokenmill:{name}"] == (kind, value)


def test_kv_blocks_add_up_to_the_total() -> None:
    states = [value for name, (_, value) in exported().items() if name.startswith("tokenmill:kv_blocks,")]
    assert sum(states) == STATS.blocks_total
