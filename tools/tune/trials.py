"""What is measured: the defaults, the best of the search, and the combinations of `--grid`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from config.sources import ConfigError
from tools.tune.grid import GridError, check_number
from tools.tune.predicting import Prediction
from tools.tune.search import Point
from tools.tune.space import Candidate, Space, Value, flags_of


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of the grid: the flags that the user has named, and what they come to."""

    flags: list[str]
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Trial:
    """A combination of settings: from the search, where `point` is not None, or from the grid, or both."""

    name: str
    point: Point | None
    flags: list[str]
    candidate: Candidate
    prediction: Prediction
    in_grid: bool


def cells_of(
    space: Space, grids: Sequence[Sequence[Mapping[str, Value]]], leave_out: Callable[[str], None]
) -> list[Cell]:
    """What the server would make of each combination, each once.

    `leave_out` is told of those that it would refuse. GridError where it would refuse all, or there are too many.
    """
    found: dict[Candidate, Cell] = {}
    check_number(sum(map(len, grids)))
    reason = ""
    for settings in (settings for grid in grids for settings in grid):
        flags = flags_of(settings)
        for name, flag in zip(settings, flags, strict=True):
            if space.is_given(name):
                raise GridError(f"{flag}: the flags after -- say something of it already")
        try:
            candidate = space.with_settings(settings)
        except ConfigError as error:
            reason = f"{' '.join(flags)}: {error}"
            leave_out(reason)
            continue
        found.setdefault(candidate, Cell(flags, candidate))
    if reason and not found:
        raise GridError(f"the server would refuse every combination, such as {reason}")
    return list(found.values())
