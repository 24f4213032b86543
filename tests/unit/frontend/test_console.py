"""What the console makes of counters: rates between two reports, and quantiles of the last moments."""

import math
from bisect import bisect_left

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from frontend.console.latency import WINDOW, Window
from frontend.console.sampling import rates_between
from ipc.stats_messages import Stats

BOUNDS = (0.01, 0.1, 1.0, 10.0, math.inf)
_REQUIRED = Stats.__struct_fields__[: -len(Stats.__struct_defaults__)]
ZERO = Stats(**dict.fromkeys(_REQUIRED, 0))


def counts(observations: list[float]) -> dict[float, float]:
    """What a histogram with these bounds says after these observations."""
    return {bound: float(sum(value <= bound for value in observations)) for bound in BOUNDS}


@given(st.lists(st.floats(0.0001, 100.0), max_size=60), st.lists(st.floats(0.0001, 100.0), max_size=40))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(before: list[float], recent: list[float]) -> None:
    window = Window()
    window.add(0.0, counts(before))
    latency = window.add(1.0, counts(before + recent))
    assert latency.count == len(recent)
    for share, least, value in ((0.5, 2, latency.p50), (0.9, 10, latency.p90)):
        if len(recent) < least:
            assert value is None
            continue
        assert value is not None
        true = sorted(recent)[math.ceil(share * len(recent)) - 1]
        index = bisect_left(BOUNDS, true)
        assert (BOUNDS[index - 1] if index else 0.0) <= value <= min(BOUNDS[index], BOUNDS[-2])


def test_what_is_older_than_the_window_counts_no_more() -> None:
    window = Window()
    window.add(0.0, counts([]))
    assert window.add(1.0, counts([5.0] * 10)).p50 is not None
    for second in range(2, int(WINDOW) + 1):
        assert window.add(float(second), counts([5.0] * 10)).count == 10
    late = window.add(WINDOW + 2.0, counts([5.0] * 10 + [0.05] * 3))
    assert late.count == 3
    assert late.p50 is not None
    assert 0.01 <= late.p50 <= 0.1


def test_there_is_no_rate_across_a_restart_or_without_news() -> None:
    old = msgspec.structs.replace(ZERO, time=10.0, step=50, generated_tokens=900)
    assert rates_between(None, old) is None
    assert rates_between(old, old) is None
    assert rates_between(old, msgspec.structs.replace(ZERO, time=12.0, step=1)) is None
    rates = rates_between(old, msgspec.structs.replace(old, time=12.0, step=60, generated_tokens=1000))
    assert rates is not None
    assert (rates.decode_tokens, rates.prefill_tokens) == (50.0, 0.0)
