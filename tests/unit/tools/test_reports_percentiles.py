"""Intervals, against tables that others have made and the definitions."""

from collections.abc import Callable
from math import comb, exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.reports.percentiles import (
    Interval,
    grouped_interval,
    mean_interval,
    order_interval,
    percentile,
    ratio_interval,
    share_interval,
)


def holds(interval: Interval, truth: float) -> bool:
    """No bound holds everything on its side."""
    return (interval.low is None or interval.low <= truth) and (interval.high is None or truth <= interval.high)


@given(values=st.lists(st.floats(0, 1e6), max_size=250), percent=st.sampled_from([50, 90, 99]))
def test_percentiles_are_those_of_the_straight_lines_between_the_values(values: list[float], percent: int) -> None:
    """Hyndman and Fan (1996), definition 7, in whole numbers; none where fewer than one value lies beyond."""
    found = percentile(np.array(values), percent)
    if len(values) * (100 - percent) < 100:
        assert found is None
        return
    below, rest = divmod((len(values) - 1) * percent, 100)
    ordered = sorted(values)
    above = ordered[min(below + 1, len(ordered) - 1)]
    assert found == pytest.approx(ordered[below] + rest / 100 * (above - ordered[below]))


@pytest.mark.parametrize(("count", "percent"), [(30, 50), (40, 90), (100, 90), (120, 99), (500, 99)])
@pytest.mark.parametrize("kind", ["exponential", "lognormal"])
def test_intervals_of_percentiles_hold_the_true_one_as_often_as_they_say(count: int, percent: int, kind: str) -> None:
    """Of 1,000 samples: 95% and more, less three standard errors."""
    rng = np.random.default_rng(7)
    draws = {"exponential": rng.exponential, "lognormal": lambda size: rng.lognormal(0.0, 1.0, size)}
    normal = {50: 0.0, 90: 1.2815516, 99: 2.3263479}[percent]
    truth = {"exponential": -log(1 - percent / 100), "lognormal": exp(normal)}[kind]
    draw: Callable[..., np.ndarray] = draws[kind]
    covered = sum(holds(order_interval(draw(size=count), percent), truth) for _ in range(1000))
    assert covered >= 930


@pytest.mark.parametrize("percent", [50, 90])
def test_intervals_over_groups_hold_the_true_one_about_as_often_as_they_say(percent: int) -> None:
    """200 samples of 80 streams of 15 gaps: log-normal between the streams and, less so, within each of them.

    Taken for 1,200 independent values they would hold it much more seldom.
    """
    rng = np.random.default_rng(11)
    groups = np.repeat(np.arange(80), 15)
    truth = exp({50: 0.0, 90: 1.2815516}[percent] * (0.5**2 + 0.3**2) ** 0.5)
    covered = naive = 0
    for _ in range(200):
        values = np.exp(np.repeat(rng.normal(0.0, 0.5, 80), 15) + rng.normal(0.0, 0.3, 1200))
        covered += holds(grouped_interval(values, groups, percent), truth)
        naive += holds(order_interval(values, percent), truth)
    assert covered >= 180
    assert naive < 160


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12), percent=st.sampled_from([50, 90, 99]))
def test_intervals_over_groups_are_a_bootstrap_of_whole_groups(sizes: list[int], percent: int) -> None:
    """By brute force with the same draws: the groups that were drawn, one after the other, as often as they were."""
    values = np.random.default_rng(3).exponential(1.0, sum(sizes))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(200):
        drawn = rng.integers(0, len(sizes), len(sizes))
        sample = np.concatenate([values[groups == group] for group in drawn])
        found.append(np.percentile(sample, percent, method="inverted_cdf"))
    interval = grouped_interval(values, groups, percent)
    assert (interval.low, interval.high) == pytest.approx(tuple(np.percentile(found, [2.5, 97.5])))


@pytest.mark.parametrize("count", [20, 60, 200])
def test_intervals_of_shares_hold_the_true_one_about_as_often_as_they_say(count: int) -> None:
    """Every outcome weighted with its probability: near 95% for each share, and so on average."""
    coverages = []
    for share in np.arange(0.04, 0.97, 0.02).tolist():
        chances = [comb(count, part) * share**part * (1 - share) ** (count - part) for part in range(count + 1)]
        coverages.append(
            sum(chance for part, chance in enumerate(chances) if holds(share_interval(part, count), share))
        )
    assert min(coverages) > 0.91
    assert np.mean(coverages) == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(
    ("count", "ranks"), [(5, (None, None)), (6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (50, (18, 33)), (100, (40, 61))]
)
def test_ranks_around_the_median_are_those_of_the_tables(count: int, ranks: tuple[int | None, int | None]) -> None:
    """Conover, Practical Nonparametric Statistics: 95% confidence limits of the median."""
    found = order_interval(np.arange(1.0, count + 1), 50)
    assert (found.low, found.high) == ranks


@given(count=st.integers(1, 300), percent=st.sampled_from([50, 90, 99]))
def test_the_interval_covers_what_it_promises_and_none_within_it_does(count: int, percent: int) -> None:
    found = order_interval(np.arange(1.0, count + 1), percent)

    def at_most(k: int) -> float:
        """Exactly, in whole numbers: of so many values so many lie below the percentile."""
        numerator = sum(comb(count, i) * percent**i * (100 - percent) ** (count - i) for i in range(k + 1))
        return numerator / 100**count

    if found.low is not None:
        low = int(found.low)
        assert at_most(low - 1) <= 0.025 < at_most(low)
    else:
        assert at_most(0) > 0.025
    if found.high is not None:
        high = int(found.high)
        assert at_most(high - 1) >= 0.975
        assert high == 1 or at_most(high - 2) < 0.975
    else:
        assert at_most(count - 1) < 0.975


@pytest.mark.parametrize(
    ("part", "count", "low", "high"), [(8, 10, 0.490, 0.943), (0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0)]
)
def test_intervals_of_shares_are_wilsons(part: int, count: int, low: float, high: float) -> None:
    """Wilson (1927); numbers as in Agresti and Coull (1998) and common calculators."""
    found = share_interval(part, count)
    assert found.low == pytest.approx(low, abs=6e-4)
    assert found.high == pytest.approx(high, abs=6e-4)


def test_a_share_is_never_below_none_or_above_all() -> None:
    for part, count in ((share * number, number) for number in range(1, 400) for share in (0, 1)):
        found = share_interval(part, count)
        assert found.low is not None
        assert found.high is not None
        assert 0.0 <= found.low <= part / count <= found.high <= 1.0
        assert "-" not in f"{found.low:.1%}"


def test_values_of_one_group_count_as_one() -> None:
    """Repeating what a group has makes nothing more certain."""
    rng = np.random.default_rng(5)
    values, groups = rng.exponential(1.0, 60), np.arange(60)
    once = grouped_interval(values, groups, 90)
    repeated = grouped_interval(np.repeat(values, 7), np.repeat(groups, 7), 90)
    assert (repeated.low, repeated.high) == (once.low, once.high)
    apart = grouped_interval(np.repeat(values, 7), np.arange(420), 90)
    assert apart.low is not None
    assert apart.high is not None
    assert once.low is not None
    assert once.high is not None
    assert apart.high - apart.low < once.high - once.low


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_the_bootstrap_of_a_mean_is_that_of_the_normal_distribution(count: int) -> None:
    """Efron and Tibshirani (1993), 5.12: its standard error is sigma / sqrt(n), sigma with n as divisor."""
    values = np.random.default_rng(count).normal(5.0, 2.0, count)
    found = mean_interval(values)
    half = 1.96 * values.std() / count**0.5
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_an_interval_of_a_mean_is_exact_where_there_is_one_value() -> None:
    found = mean_interval(np.array([0.75]))
    assert (found.low, found.high) == (0.75, 0.75)


def test_of_nothing_nothing_is_known() -> None:
    empty = np.empty(0)
    assert mean_interval(empty).low is None
    assert order_interval(empty, 50).low is None
    assert grouped_interval(empty, np.empty(0, dtype=np.int64), 50).high is None
    assert share_interval(0, 0).low is None


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.9), (0.8, 0.85), (0.95, 0.95), (0.3, 0.1)])
def test_intervals_of_ratios_hold_the_true_one_as_often_as_they_say(p: float, q: float) -> None:
    """Every outcome of 60 requests each, weighted with its probability."""
    count = 60

    def chances(share: float) -> list[float]:
        return [comb(count, part) * share**part * (1 - share) ** (count - part) for part in range(count + 1)]

    covered = 0.0
    for part, ours in enumerate(chances(p)):
        for other, theirs in enumerate(chances(q)):
            found = ratio_interval(part, other, count)
            assert found.low is not None
            if found.low <= p / q and (found.high is None or p / q <= found.high):
                covered += ours * theirs
    assert 0.93 < covered < 0.98


@pytest.mark.parametrize(("part", "other"), [(30, 36), (40, 40), (12, 3), (1, 40)])
def test_the_interval_of_the_inverse_ratio_is_the_inverse_interval(part: int, other: int) -> None:
    found, inverse = ratio_interval(part, other, 40), ratio_interval(other, part, 40)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= part / other <= found.high
    assert (inverse.low, inverse.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_a_ratio_to_nothing_has_no_upper_bound() -> None:
    assert ratio_interval(3, 0, 40).high is None
    assert ratio_interval(0, 30, 40).low == 0
    assert ratio_interval(0, 0, 0).low is None
