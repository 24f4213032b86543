"""The search among settings: on landscapes whose optimum is known."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.tune.search import Outcome, Point, Score, Search, changes

SEPARABLE = st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=5), min_size=1, max_size=5)


class Landscape:
    """What a table of points is worth; counts what it is asked."""

    def __init__(self, values: dict[Point, float | None]) -> None:
        self.values = values
        self.asked: list[Point] = []

    def __call__(self, points: Sequence[Point]) -> list[Score | None]:
        self.asked += points
        worth = [self.values[point] for point in points]
        return [None if value is None else (value,) for value in worth]

    def search(self, *, budget: int, seed: int = 0) -> Outcome:
        sizes = [max(column) + 1 for column in zip(*self.values, strict=True)]
        return Search(sizes, self, budget=budget, seed=seed).run()


def separable(parts: list[list[int]]) -> Landscape:
    """Each setting contributes something of its own."""
    points = itertools.product(*(range(len(part)) for part in parts))
    return Landscape({point: sum(part[index] for part, index in zip(parts, point, strict=True)) for point in points})


@settings(max_examples=60, deadline=None)
@given(SEPARABLE, st.integers(0, 3))
def test_independent_settings_are_found_in_two_descents(parts: list[list[int]], seed: int) -> None:
    """One pass over the settings reaches the optimum, a second one finds that it is one: twice the values, at most."""
    landscape = separable(parts)
    budget = 2 * sum(map(len, parts)) + len(parts) + 1
    outcome = landscape.search(budget=budget, seed=seed)
    best = outcome.order[0]
    assert outcome.scores[best] == (sum(map(max, parts)),)
    # Of all that are worth the same it has the fewest changes.
    assert changes(best) == sum(part[0] != max(part) for part in parts)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(0, 3))
def test_no_landscape_makes_it_break_its_promises(data: st.DataObject, budget: int, seed: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    points = list(itertools.product(*map(range, sizes)))
    worth = data.draw(st.lists(st.none() | st.integers(-3, 3), min_size=len(points), max_size=len(points)).map(list))
    landscape = Landscape(dict(zip(points, worth, strict=True)))
    outcome = landscape.search(budget=budget, seed=seed)
    assert len(landscape.asked) == len(set(landscape.asked)) <= budget
    assert landscape.asked[0] == (0,) * len(sizes)
    assert set(outcome.order) == {point for point in landscape.asked if landscape.values[point] is not None}
    found = [outcome.scores[point] for point in outcome.order]
    assert found == sorted(found, reverse=True)
    again = Landscape(landscape.values)
    assert again.search(budget=budget, seed=seed) == outcome
    assert again.asked == landscape.asked


def test_what_only_pays_together_is_found_from_another_start() -> None:
    """From the defaults each change alone makes it worse."""
    points = itertools.product(range(4), repeat=3)
    landscape = Landscape({point: 10.0 if point[:2] == (2, 3) else -float(changes(point)) for point in points})
    outcome = landscape.search(budget=60)
    assert outcome.order[0] == (2, 3, 0)


@pytest.mark.parametrize("seed", range(5))
def test_changes_that_do_nothing_are_taken_back(seed: int) -> None:
    """Only the first setting matters, and a random start has changed the others: they end as defaults."""
    points = list(itertools.product(range(3), repeat=4))
    landscape = Landscape({point: (0.0 if point == (0, 0, 0, 0) else float(point[0] == 1)) for point in points})
    assert landscape.search(budget=80, seed=seed).order[0] == (1, 0, 0, 0)


def test_impossible_defaults_leave_the_others() -> None:
    landscape = Landscape({(0, 0): None, (0, 1): None, (1, 0): 1.0, (1, 1): 2.0})
    outcome = landscape.search(budget=10)
    assert outcome.order == [(1, 1), (1, 0)]
