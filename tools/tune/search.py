"""Search among settings of which each has a few values: coordinate descent from the defaults, then from random points.

A point is a tuple of indices, one for each setting; index 0 is the default. Whoever calls says what a point is worth.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

Point = tuple[int, ...]
Score = tuple[float, ...]  # compared from the left; more is better
Evaluate = Callable[[Sequence[Point]], Sequence[Score | None]]  # None: these settings cannot be


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search has found. `order`: all points that can be, the best first; those worth the same with fewer changes
    from the defaults first."""

    scores: Mapping[Point, Score]
    order: list[Point]


class _Budget(Exception):
    """As many points as are allowed have been tried."""


def changes(point: Point) -> int:
    """How many settings differ from the defaults."""
    return sum(index != 0 for index in point)


class Search:
    """One search; equal arguments give equal results."""

    def __init__(self, sizes: Sequence[int], evaluate: Evaluate, *, budget: int, seed: int) -> None:
        """`sizes`: number of values of each setting. `budget`: most points that are handed to `evaluate`."""
        self._sizes = sizes
        self._evaluate = evaluate
        self._budget = budget
        self._limit = max(1, budget - len(sizes))  # what is left makes the best point simpler
        self._random = random.Random(seed)
        self._scores: dict[Point, Score | None] = {}

    def run(self) -> Outcome:
        """Until the budget is used up, every point has been tried, or fresh starts find nothing new."""
        default: Point = (0,) * len(self._sizes)
        total = 1
        for size in self._sizes:
            total *= size
        with suppress(_Budget):
            self._descend(default)
            while len(self._scores) < total:
                tried = len(self._scores)
                self._descend(self._fresh_start(total))
                if len(self._scores) == tried:
                    break
        self._limit = self._budget
        with suppress(_Budget):
            self._simplify(max(self._scores, key=self._worth))
        return self._outcome()

    def _outcome(self) -> Outcome:
        scores = {point: score for point, score in self._scores.items() if score is not None}
        return Outcome(scores, sorted(scores, key=self._worth, reverse=True))

    def _worth(self, point: Point) -> tuple[bool, Score, int, Point]:
        """What points are compared by; the last part only settles ties."""
        score = self._scores.get(point)
        return score is not None, score or (), -changes(point), tuple(-index for index in point)

    def _try(self, points: Sequence[Point]) -> None:
        fresh = [point for point in dict.fromkeys(points) if point not in self._scores]
        affordable = fresh[: self._limit - len(self._scores)]
        if affordable:
            self._scores.update(zip(affordable, self._evaluate(affordable), strict=True))
        if len(affordable) < len(fresh):
            raise _Budget

    def _descend(self, start: Point) -> Point:
        """Each setting in turn, all its values at once, in an order that is drawn anew, until none makes it better."""
        best = start
        self._try([best])
        improved = True
        while improved:
            improved = False
            for setting in self._random.sample(range(len(self._sizes)), len(self._sizes)):
                line = [(*best[:setting], index, *best[setting + 1 :]) for index in range(self._sizes[setting])]
                self._try(line)
                winner = max(line, key=self._worth)
                if self._worth(winner) > self._worth(best):
                    best, improved = winner, True
        return best

    def _simplify(self, best: Point) -> None:
        """Without each change that is not needed: what is left says what matters."""
        for setting, index in enumerate(best):
            if index:
                simpler = (*best[:setting], 0, *best[setting + 1 :])
                self._try([simpler])
                best = max(best, simpler, key=self._worth)

    def _fresh_start(self, total: int) -> Point:
        """A random point that has not been tried, or any one where those are hard to find."""
        for _ in range(min(100, total)):
            point = tuple(self._random.randrange(size) for size in self._sizes)
            if point not in self._scores:
                break
        return point
