"""Reads what /metrics answers."""

from prometheus_client.parser import text_string_to_metric_families


def value(text: str, name: str, **labels: str) -> float:
    """The value of a metric, summed over its series that have at least these labels; there must be one."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, (name, labels)
    return sum(found)
