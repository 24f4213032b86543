"""When requests are due, which are measured, and who sends them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.loadgen.schedule import Phases, at_rate, closed_loop, dealt, open_loop, ramped
from tools.loadgen.sources import Request
from tools.loadgen.synthetic import TRACE_ARRIVALS, parse_arrivals


def requests(times: list[float]) -> list[Request]:
    return [Request(time, 10, 5) for time in times]


def test_in_the_ramp_the_rate_rises_linearly() -> None:
    """At a steady rate r, r t^2 / (2 S) requests have come at moment t of a ramp of S seconds."""
    rate, ramp = 100.0, 4.0
    times = [ramped(at / rate, ramp) for at in range(1000)]
    for moment in (1.0, 2.0, 3.0, 4.0):
        assert sum(time < moment for time in times) == pytest.approx(rate * moment**2 / (2 * ramp), abs=1)
    assert sum(4.0 <= time < 5.0 for time in times) == pytest.approx(rate, abs=1)
    assert times == sorted(times)


@given(times=st.lists(st.integers(0, 10_000), min_size=1, max_size=30), ramp=st.integers(0, 50))
def test_a_ramp_keeps_the_order(times: list[int], ramp: int) -> None:
    ordered = sorted(time / 100 for time in times)
    moved = [ramped(time, ramp) for time in ordered]
    assert moved == sorted(moved)
    assert all(after >= before for before, after in zip(ordered, moved, strict=True))


def test_what_is_measured_lies_between_warm_up_and_cool_down() -> None:
    schedule = open_loop(requests([0.0, 1.0, 2.0, 3.0, 4.0]), TRACE_ARRIVALS, Phases(0.0, 1.0, 0.5))
    assert [item.due for item in schedule.items] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [schedule.measures(item.due) for item in schedule.items] == [False, True, True, True, False]
    short = open_loop(requests([0.0, 1.0, 2.0, 3.0, 4.0]), TRACE_ARRIVALS, Phases(), duration=2.5)
    assert [item.due for item in short.items] == [0.0, 1.0, 2.0]


def test_users_begin_one_after_the_other_in_the_ramp_and_stay_with_their_process() -> None:
    schedule = closed_loop(requests([0.0] * 7), parse_arrivals("closed:3,2"), Phases(ramp=6.0), duration=50)
    assert [item.due for item in schedule.items] == [0.0, 2.0, 4.0, 2.0, 2.0, 2.0, 2.0]
    assert [item.user for item in schedule.items] == [0, 1, 2, 0, 1, 2, 0]
    hands = dealt(schedule.items, 2, closed=True)
    assert [[item.index for item in hand] for hand in hands] == [[0, 2, 3, 5, 6], [1, 4]]
    assert schedule.end == 50
    assert math.isinf(closed_loop(requests([0.0]), parse_arrivals("closed:1"), Phases()).end)


@given(
    gaps=st.lists(st.floats(0.01, 10), min_size=1, max_size=40),
    rate=st.floats(0.1, 50),
    seconds=st.floats(0.1, 60),
)
def test_a_part_of_a_trace_has_exactly_the_rate_that_was_asked_for(
    gaps: list[float], rate: float, seconds: float
) -> None:
    times = [sum(gaps[:at]) for at in range(len(gaps) + 1)]
    found = at_rate(requests(times), rate, seconds)
    assert 2 <= len(found) <= max(2, math.ceil(rate * seconds))
    assert (len(found) - 1) / found[-1].time == pytest.approx(rate)


def test_requests_of_one_moment_have_no_rate() -> None:
    with pytest.raises(ValueError, match="one moment"):
        at_rate(requests([0.0, 0.0, 0.0, 5.0]), 1.0, 3.0)
