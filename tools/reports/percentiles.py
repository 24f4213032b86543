"""Percentiles that the number of values supports, and how far they and means can be trusted."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def percentile(values: Floats, percent: int) -> float | None:
    """Linear interpolation; None when there are fewer than 100 / (100 - percent) values to support it."""
    if len(values) < 100 / (100 - percent):
        return None
    return float(np.percentile(values, percent))


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the true value lies with at least the confidence that was asked for; None: the values set no bound."""

    low: float | None
    high: float | None


def order_interval(values: Floats, percent: int, confidence: float = 0.95) -> Interval:
    """Of a percentile, from the order statistics of independent values alone: no distribution is assumed.

    How many of n values lie below the true percentile is binomial; David & Nagaraja, Order Statistics, section 7.1.
    """
    count = len(values)
    if not count:
        return Interval(None, None)
    share, tail = percent / 100, (1 - confidence) / 2
    below = np.arange(1, count + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((count - below + 1) / below))])  # of binomial coefficients
    ks = np.arange(count + 1)
    cumulative = np.cumsum(np.exp(logs + ks * math.log(share) + (count - ks) * math.log1p(-share)))
    low = int(np.searchsorted(cumulative, tail, "right"))  # so many may be left out below
    high = int(np.searchsorted(cumulative, 1 - tail, "left")) + 1
    ordered = np.sort(values)
    return Interval(
        float(ordered[low - 1]) if low >= 1 else None,
        float(ordered[high - 1]) if high <= count else None,
    )


def grouped_interval(
    values: Floats, groups: npt.NDArray[np.int64], percent: int, confidence: float = 0.95, rounds: int = 200
) -> Interval:
    """Of a percentile of values that belong together in groups, as the gaps of one stream do: bootstrap over groups.

    `groups`: the group of each value, from 0. The draws are the same each time.
    """
    if not len(values):
        return Interval(None, None)
    rng = np.random.default_rng(0)
    order = np.argsort(values, kind="stable")
    ordered, groups = values[order], groups[order]
    number = int(groups.max()) + 1
    found = []
    for _ in range(rounds):
        times_drawn = np.bincount(rng.integers(0, number, number), minlength=number)
        weights = np.cumsum(times_drawn[groups])
        if weights[-1]:
            found.append(ordered[np.searchsorted(weights, percent / 100 * weights[-1])])
    tail = (1 - confidence) / 2 * 100
    low, high = np.percentile(found, [tail, 100 - tail])
    return Interval(float(low), float(high))


def mean_interval(values: Floats, confidence: float = 0.95, rounds: int = 10_000) -> Interval:
    """Of the mean of independent values: percentile bootstrap. The draws are the same each time.

    Of few values it is too narrow, of ten about a sixth.
    """
    if not len(values):
        return Interval(None, None)
    drawn = np.random.default_rng(0).integers(0, len(values), (rounds, len(values)))
    tail = (1 - confidence) / 2 * 100
    low, high = np.percentile(values[drawn].mean(axis=1), [tail, 100 - tail])
    return Interval(float(low), float(high))


def ratio_interval(part: int, other: int, count: int) -> Interval:
    """Of the ratio of two shares of `count` each, 95%: from the Wilson interval of each, by the method of variance
    estimates recovery (Donner & Zou, 2012), as if the two were independent. `high` is None where nothing bounds it.
    """
    ours, theirs = share_interval(part, count), share_interval(other, count)
    if ours.low is None or ours.high is None or theirs.low is None or theirs.high is None:
        return Interval(None, None)
    p, q = part / count, other / count
    below, above = ours.low * (2 * p - ours.low), ours.high * (2 * p - ours.high)
    slack, least = theirs.high * (2 * q - theirs.high), theirs.low * (2 * q - theirs.low)
    both = p * q
    # In this form of the quadratic's smaller root nothing cancels where theirs is not far from 0.
    low = below / (both + math.sqrt(max(0.0, both * both - below * slack))) if both else 0.0
    high = (both + math.sqrt(max(0.0, both * both - above * least))) / least if other else None
    return Interval(low, high)


def share_interval(part: int, count: int, z: float = 1.96) -> Interval:
    """Of a share of so many: Wilson's score interval, here of 95%."""
    if not count:
        return Interval(None, None)
    share = part / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # Rounding may put a bound beyond the share itself, which of none and all is the bound.
    return Interval(max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))
