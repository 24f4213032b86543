"""The tuner's choice beside the best that was found at all, which a grid of combinations is measured for."""

from collections.abc import Sequence

from msgspec import Struct

from tools.reports.percentiles import Interval, ratio_interval
from tools.reports.table import Rows, render, seconds
from tools.tune.figures import Figures
from tools.tune.report import Arm, better, error_of


class Comparison(Struct, frozen=True):
    """Goodput of the choice as a share of the best found, which is the choice itself where nothing was better.

    `low`, `high`: 95%, as if both had been measured independently. None: not known.
    """

    best: str
    best_of_grid: str
    ratio: float | None
    low: float | None
    high: float | None


def compared(chosen: Arm, arms: Sequence[Arm]) -> Comparison | None:
    """Among the arms that were measured, if some were; None where the choice, or all of a grid, is not among these."""
    arms = [arm for arm in arms if arm.measured] or arms
    if chosen not in arms:
        return None
    grid = [arm for arm in arms if arm.in_grid]
    if not grid:
        return None
    # The choice in front: of equals it is the best.
    best = better([chosen, *arms], by_goodput=True)
    ours, theirs = chosen.found, best.found
    same = ours.requests == theirs.requests  # not so where the confirmation ended within a round
    interval = ratio_interval(ours.met, theirs.met, theirs.requests) if same else Interval(None, None)
    ratio = ours.goodput / theirs.goodput if theirs.goodput else None
    return Comparison(best.name, better(grid, by_goodput=True).name, ratio, interval.low, interval.high)


def comparison_text(found: Comparison, chosen: Arm, arms: Sequence[Arm]) -> str:
    """The verdict in a line."""
    by_name = {arm.name: arm for arm in arms}
    best = by_name[found.best]
    how = "measured" if chosen.measured else "predicted"
    if found.ratio is None:
        return f"choice / best found: not known, since nothing met the SLO ({how})"
    ours = f"{chosen.name} {chosen.found.goodput:.3f} req/s"
    if best.name == chosen.name:
        other = by_name[found.best_of_grid]
        beside = "it is" if other.name == chosen.name else f"{other.name} {other.found.goodput:.3f} req/s is"
        return f"choice / best found: 1.000 of the goodput, {how}: {ours}; {beside} the best of the grid"
    text = (
        f"choice / best found: {found.ratio:.3f} of the goodput, {how}: {ours}, {best.name} "
        f"{best.found.goodput:.3f} req/s ({best.text})"
    )
    if chosen.measured and found.low is not None:
        high = "no bound" if found.high is None else f"{found.high:.2f}"
        text += f"; 95% interval {found.low:.2f} to {high}"
        if found.high is None or found.high >= 1:
            text += ", so that it is less than 1 may be chance: more --rounds or a longer trace would tell"
    return text


def overview(arms: Sequence[Arm]) -> str:
    """A line for each arm, those of the grid too, whose columns would not fit beside each other."""
    measured = any(arm.measured for arm in arms)
    numbers = ["in time", "goodput", "TTFT p50", "TTFT p90", "ITL p50", "ITL p90"]
    labels = [*numbers, "in time, predicted", "largest error"] if measured else numbers
    rows: Rows = []
    for arm in arms:
        grid = " (grid)" if arm.in_grid and arm.searched else ""
        values = _values(arm.found) if arm.measured or not measured else ["-"] * len(numbers)
        if measured:
            values += [f"{arm.predicted.figures.share:.1%}", _largest_error(arm)]
        rows.append((f"{arm.name}{grid}: {arm.text}", values))
    return render(labels, rows)


def _values(found: Figures) -> list[str]:
    return [
        f"{found.share:.1%}",
        f"{found.goodput:.3f} req/s",
        *(seconds(value) for value in (found.ttft.p50, found.ttft.p90, found.itl.p50, found.itl.p90)),
    ]


def _largest_error(arm: Arm) -> str:
    """Of TTFT and ITL, p50 and p90, with the costs rescaled by the arm's warm-up where that was done."""
    if arm.measured is None:
        return "-"
    error = error_of(arm, arm.rescaled or arm.predicted)
    values = [value for value in (error.ttft_p50, error.ttft_p90, error.itl_p50, error.itl_p90) if value is not None]
    return f"{max(values, key=abs):+.0%}" if values else "-"
