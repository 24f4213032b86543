"""From the times of settings on some shapes to a table for all shapes.

Each entry of the shipped table keeps the shapes that it is for. Where no single choice of settings is good for those of
them that were measured, the entry is split like a regression tree (Breiman et al. 1984): along one parameter, half-way
between two measured values in their logarithm, so that a shape in between has the settings of its nearest neighbour.
Every entry that results has a measured shape.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from operator import not_
from typing import Any

from kernels.gpu.tables import Entry, Shape, entry_index

_NOISE = 0.02  # the shipped settings stay where others are faster by no more than this part
_WORTH = 0.03  # an entry more must make some shape faster by this part


@dataclass(frozen=True, slots=True)
class Point:
    """A measured shape. `seconds` by the settings' `key`: of those that were right."""

    shape: Shape
    seconds: Mapping[str, float]


def key(settings: Mapping[str, Any]) -> str:
    """The same for the same settings."""
    return json.dumps(settings, sort_keys=True)


def retuned(entries: Sequence[Entry], points: Sequence[Point]) -> list[Entry]:
    """A kernel's entries with settings chosen anew; entries that no point reaches stay as they are."""
    result: list[Entry] = []
    for index, entry in enumerate(entries):
        reaching = [point for point in points if point.seconds and entry_index(entries, point.shape) == index]
        if reaching:
            tree = _best(reaching, key(entry["use"]))
            result += [
                {"when": when, "use": json.loads(use)} if when else {"use": json.loads(use)}
                for when, use in tree.entries(dict(entry.get("when", {})))
            ]
        else:
            result.append(entry)
    return result


@dataclass(frozen=True, slots=True)
class _Tree:
    """One choice of settings, `use`; or `first` for the shapes whose `parameter` is `condition`, else `rest`.

    `cost`: the logarithms of how much slower than its best each point is, added up, and `_WORTH` for each choice.
    """

    cost: float
    use: str = ""
    parameter: str = ""
    condition: int | str = 0  # a value, or of a number the highest one
    branches: tuple["_Tree", ...] = ()

    def entries(self, when: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        """(when, use) in the order in which they are to be tried."""
        if not self.branches:
            yield when, self.use
            return
        condition: Any = self.condition
        if not isinstance(condition, str):
            before = when.get(self.parameter)
            condition = [before[0] if isinstance(before, list) else 0, condition]
        first, rest = self.branches
        yield from first.entries({**when, self.parameter: condition})
        yield from rest.entries(when)


def _best(points: Sequence[Point], shipped: str) -> _Tree:
    """The cheaper one of a single choice and of the best split."""
    single = _single(points, shipped)
    splits = [
        (_single(first, shipped).cost + _single(rest, shipped).cost, parameter, str(condition), condition, first, rest)
        for parameter, condition, first, rest in _splits(points)
    ]
    if not splits:
        return single
    _, parameter, _, condition, first, rest = min(splits, key=lambda split: split[:3])
    branches = _best(first, shipped), _best(rest, shipped)
    cost = sum(branch.cost for branch in branches)
    return _Tree(cost, "", parameter, condition, branches) if cost < single.cost else single


def _single(points: Sequence[Point], shipped: str) -> _Tree:
    """One choice for all points: the shipped one, unless another is faster by more than the noise.

    Settings that were not right on one of them, or not tried, can't be chosen; where none is left, it costs infinitely.
    """
    common = [use for use in points[0].seconds if all(use in point.seconds for point in points)]

    def loss(use: str) -> float:
        return math.fsum(math.log(point.seconds[use] / min(point.seconds.values())) for point in points)

    if not common:
        return _Tree(math.inf, shipped)
    use = min(common, key=loss)
    if shipped in common and loss(shipped) <= loss(use) + len(points) * math.log1p(_NOISE):
        use = shipped
    return _Tree(loss(use) + math.log1p(_WORTH), use)


def _splits(points: Sequence[Point]) -> Iterator[tuple[str, int | str, list[Point], list[Point]]]:
    """(parameter, condition, points for which it holds, the others), of each way to split them in two."""
    for parameter in points[0].shape:
        values = sorted({point.shape[parameter] for point in points})
        conditions: Sequence[int | str] = values if len(values) > 1 else ()
        if all(isinstance(value, int) for value in values):
            conditions = [math.isqrt(int(low) * int(high)) for low, high in pairwise(values)]
        for condition in conditions:
            meeting = [_meets(point.shape[parameter], condition) for point in points]
            first = list(compress(points, meeting))
            yield parameter, condition, first, list(compress(points, map(not_, meeting)))


def _meets(value: int | str, condition: int | str) -> bool:
    if isinstance(value, int) and isinstance(condition, int):
        return value <= condition
    return value == condition
