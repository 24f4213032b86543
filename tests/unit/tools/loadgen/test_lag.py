"""When a run is void."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.loadgen.lag import Flights, Limits, WorkerLoad, client_load, send_lags, waits
from tools.reports.percentiles import Floats

TICK = 0.01


def worker(lags: Sequence[float], cpu: Sequence[float], *, start: float = 0.0) -> WorkerLoad:
    """Looks one after the other from `start` on, and shares of a core in spans of half a second."""
    seen = start + np.cumsum(TICK + np.array(lags))
    return WorkerLoad(
        list(zip(seen.tolist(), lags, strict=True)),
        TICK,
        [(start + at / 2, start + (at + 1) / 2, share) for at, share in enumerate(cpu)],
    )


@given(
    ticks=st.lists(
        st.tuples(st.one_of(st.just(0.0), st.floats(0, 2)), st.integers(0, 3)), min_size=1, max_size=60
    ).filter(lambda ticks: any(weight for _, weight in ticks)),
    tick=st.sampled_from([0.005, 0.01]),
)
def test_waits_are_those_of_moments_drawn_from_the_time_that_counts(
    ticks: list[tuple[float, int]], tick: float
) -> None:
    """By brute force: what comes at each of many moments waits until the loop is free; each tick is there as often as
    its weight says."""
    lags = [lag for lag, _ in ticks]
    repeated = [lag for lag, weight in ticks for _ in range(weight)]
    edges = np.cumsum([part for lag in repeated for part in (tick, lag)])
    moments = (np.arange(20_000) + 0.5) / 20_000 * edges[-1]
    after = np.searchsorted(edges, moments, "right")
    found = np.where(after % 2 == 1, edges[after] - moments, 0.0)
    step = edges[-1] / 20_000
    result = waits(np.array(lags), tick, np.array([float(weight) for _, weight in ticks]))
    assert result.p50 == pytest.approx(np.percentile(found, 50), abs=0.02 * (max(repeated) + 3 * step))
    assert result.p99 == pytest.approx(np.percentile(found, 99), abs=0.02 * (max(repeated) + 3 * step))
    assert result.max == max(repeated)


def test_one_long_stall_counts_although_it_is_one_tick() -> None:
    """Of 10 s one: for 1% of the time, the first 0.1 s of it, what came waited longer than 0.9 s."""
    assert waits(np.array([0.0] * 900 + [1.0]), 0.01, np.ones(901)).p99 == pytest.approx(1 - 0.01 * 10.01)


SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda span: (min(span), max(span))), max_size=9)


@given(flights=SPANS, spans=SPANS)
def test_seconds_of_requests_are_those_that_each_one_has(
    flights: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    found = Flights(flights)
    begin, end = np.array(spans, dtype=np.float64).reshape(-1, 2).T
    expected = [sum(max(0, min(end, to) - max(begin, since)) for since, to in flights) for begin, end in spans]
    assert found.within(begin, end) == pytest.approx(expected)
    assert found.seconds == pytest.approx(sum(to - since for since, to in flights))


def test_each_limit_makes_a_run_void() -> None:
    flights = Flights([(0.0, 1.0)] * 50)
    calm, busy = worker([0.0] * 100, [0.2, 0.3]), worker([0.0] * 100, [0.9, 0.95])
    stuck = worker([0.0] * 50 + [0.5], [0.1])
    fine = np.full(50, 0.001)
    limits = Limits(send_lag=0.01, loop_lag=0.02, cpu=0.8)
    assert client_load(fine, flights, [calm, calm], limits).void == []
    for lags, workers, word in [
        (np.append(fine, [0.011] * 3), [calm], "3 of 53 requests were sent more than 10 ms late"),
        (fine, [calm, stuck], "looked late"),
        (fine, [calm, busy], "of a core"),
    ]:
        [reason] = client_load(lags, flights, workers, limits).void
        assert word in reason
    for harmless in (np.append(fine, [0.5] * 2), np.append(np.repeat(fine, 10), [0.5] * 5)):
        assert client_load(harmless, flights, [calm], limits).void == []
    load = client_load(fine, flights, [calm, busy], limits)
    assert load.cpu == pytest.approx([0.25, 0.925])
    assert load.cpu_peak == [0.3, 0.95]


# The client was busy from the 10th to the 20th second.
BUSY = worker(
    [*[0.0] * 1000, *[0.1] * 91, *[0.0] * 10_000],
    [*[0.05] * 20, *[0.95] * 20, *[0.05] * 200],
)


@pytest.mark.parametrize(
    ("flights", "void"),
    [
        ([(10.0, 20.0)], True),
        ([(10.0, 20.0)] * 50 + [(10.0, 120.0)], True),  # the last of many answers is long
        ([(10.0, 11.0), (12.0, 13.0), (19.0, 20.0)], True),
        ([(0.0, 9.9), (21.0, 100.0)], False),  # a warm-up, or what comes after the cool-down
        ([(0.0, 10.5)] * 5 + [(20.1, 120.0)] * 50, False),
        ([], False),
    ],
    ids=["all", "one-long", "some", "outside", "mostly-outside", "none"],
)
def test_only_the_time_counts_in_which_requests_were_on_their_way(
    flights: list[tuple[float, float]], void: bool
) -> None:
    """Time in which nothing was measured neither hides a client that was the bottleneck, nor makes one of it."""
    calm: Floats = np.zeros(len(flights))
    load = client_load(calm, Flights(flights), [BUSY], Limits())
    assert ["looked late" in reason for reason in load.void] == [True, False][: 2 * void]
    assert ["of a core" in reason for reason in load.void] == [False, True][: 2 * void]


def test_of_few_requests_the_worst_one_counts() -> None:
    lags = np.array([0.0] * 98 + [1.0])
    assert send_lags(lags).p99 == 1.0
    assert send_lags(np.append(lags, [0.0] * 200)).p99 == 0.0
    assert send_lags(np.empty(0)).max == 0.0
