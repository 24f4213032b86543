"""The bisection, on servers whose answer to each rate is known."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.loadgen.rate_search import Probe, found, next_rate

PRECISION = 0.05


def probe(rate: float, share: float, void: bool = False) -> Probe:
    return Probe(rate, share, share, share, rate * share, 100, void)


def search(server: Callable[[float], Probe], target: float, first: float, most: int = 60) -> list[Probe]:
    probes: list[Probe] = []
    while (rate := next_rate(probes, target, first, PRECISION)) is not None:
        probes.append(server(rate))
        assert len(probes) <= most
    return probes


@given(capacity=st.floats(0.05, 5000), first=st.floats(0.1, 100), target=st.sampled_from([0.9, 0.99]))
def test_the_capacity_is_found_to_the_precision(capacity: float, first: float, target: float) -> None:
    def server(rate: float) -> Probe:
        return probe(rate, 1.0 if rate <= capacity else capacity / rate * target * 0.999)

    probes = search(server, target, first)
    result = found(probes, target)
    if capacity < first / 1024:
        assert result.rate is None
    elif result.missed_at is None:
        assert capacity > first * 512
    elif result.rate is not None:
        assert result.rate <= capacity < result.missed_at <= result.rate * (1 + PRECISION) * (1 + 1e-9)
    assert len(probes) <= abs(math.log2(capacity / first)) + 8


@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=200))
def test_noise_does_not_keep_it_going_and_the_bound_is_safe(shares: list[float]) -> None:
    answers = itertools.cycle(shares)
    probes = search(lambda rate: probe(rate, next(answers)), 0.9, 4.0)
    result = found(probes, 0.9)
    missed = [probe.rate for probe in probes if probe.share < 0.9]
    assert result.rate is None or all(result.rate < rate for rate in missed)


def test_what_the_first_target_has_tried_serves_the_second() -> None:
    def server(rate: float) -> Probe:
        return probe(rate, 1.0 if rate <= 5 else 0.95 if rate <= 10 else 0.5)

    probes = search(server, 0.9, 1.0)
    assert found(probes, 0.9).rate == pytest.approx(10, rel=PRECISION)
    before = len(probes)
    while (rate := next_rate(probes, 0.99, 1.0, PRECISION)) is not None:
        probes.append(server(rate))
    assert found(probes, 0.99).rate == pytest.approx(5, rel=PRECISION)
    assert len(probes) - before <= 6


def test_a_rate_at_which_the_client_was_the_limit_is_not_met_and_told() -> None:
    probes = search(lambda rate: probe(rate, 1.0, void=rate > 3), 0.9, 1.0)
    result = found(probes, 0.9)
    assert result.rate is not None
    assert 3 / (1 + PRECISION) <= result.rate <= 3
    assert result.client_limited
    assert not found([probe(1.0, 1.0), probe(2.0, 0.5)], 0.9).client_limited


def test_a_server_of_noisy_answers_has_about_its_rate() -> None:
    """Each probe is of 200 requests; the share in time falls through the target at the capacity, as steeply as it does
    where a queue begins to grow. A miss by chance bounds the search, so that it errs to the safe side.
    """
    ratios = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        capacity = float(rng.uniform(0.5, 50))

        def server(rate: float, rng: np.random.Generator = rng, capacity: float = capacity) -> Probe:
            share = 1 / (1 + (rate / capacity) ** 20 / 9)  # 0.9 at the capacity
            return probe(rate, rng.binomial(200, share) / 200)

        rate = found(search(server, 0.9, first=4.0), 0.9).rate
        assert rate is not None
        ratios.append(rate / capacity)
    low, median, high = np.percentile(ratios, [2, 50, 98])
    assert low > 0.9
    assert 1 - PRECISION < median <= 1.0
    assert high < 1 + PRECISION
