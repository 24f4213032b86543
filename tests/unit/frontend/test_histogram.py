"""A histogram that counts in batches exports what prometheus-client's own does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from frontend.histogram import BatchedHistogram

BUCKETS = (0.01, 0.1, 1.0)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.5, 1.0, 7.0]) | st.floats(0, 100), max_size=9)))
def test_it_exports_what_single_observations_would(batches: list[list[float]]) -> None:
    registry, expected = CollectorRegistry(), CollectorRegistry()
    batched = BatchedHistogram(Histogram("delay", "text", buckets=BUCKETS, registry=registry))
    plain = Histogram("delay", "text", buckets=BUCKETS, registry=expected)
    for batch in batches:
        for value in batch:
            batched.observe(value)
            plain.observe(value)
        batched.flush()
    assert samples(registry) == pytest.approx(samples(expected))
