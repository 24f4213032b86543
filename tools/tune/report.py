"""What the tuner prints: predicted beside measured, how far apart they are, and what each chosen flag contributes."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from tools.reports.table import Rows, render, seconds
from tools.tune.figures import ATTAINMENT, Figures, Quantiles
from tools.tune.predicting import Prediction

_FAR = 0.15  # error of a prediction that is pointed out
_DRIFT = 1.2  # in the time of steps, that is pointed out
_NOTHING = 0.005  # of the share of requests: a change that makes no difference


class Arm(Struct, frozen=True, kw_only=True):
    """One combination of settings: `flags` are what differs from the user's own.

    `rescaled`: what the simulator says when the calibration's costs are made as large as the arm's warm-up says that
    they were just before. `afterwards`: with the costs of the measured runs themselves. What is left of the prediction
    error then is the simulator's; the rest is that the machine was `slowdown` times as slow as when it was calibrated.
    `unfitted`: a line about why there is no `afterwards`, where it cannot be told. `lost`: a line about each run of it
    that could not be made. `searched`: the tuner's own, which alone can be its choice; `in_grid`: named by the user.
    """

    name: str
    flags: list[str]
    predicted: Prediction
    measured: Figures | None = None
    rescaled: Prediction | None = None
    afterwards: Prediction | None = None
    slowdown: float | None = None
    searched: bool = True
    in_grid: bool = False
    void: list[str] = []
    failures: list[str] = []
    lost: list[str] = []
    unfitted: str = ""

    @property
    def text(self) -> str:
        return " ".join(self.flags) or "no flags beyond yours"

    @property
    def found(self) -> Figures:
        """As measured, and where that was not done as predicted."""
        return self.measured or self.predicted.figures


class PredictionError(Struct, frozen=True):
    """predicted / measured - 1; None where either is not known."""

    arm: str
    goodput: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    itl_p50: float | None
    itl_p90: float | None


class Ablation(Struct, frozen=True):
    """What is predicted of the chosen settings without one of their flags."""

    flag: str
    without: Prediction


def better(arms: Sequence[Arm], *, by_goodput: bool = False) -> Arm:
    """The arm with the most requests in time, measured where that was done; of equals the least strained.

    A void measurement says nothing of its arm: such a one is only taken when all are. Where some were measured, what
    is predicted of the others does not count. `by_goodput`: by the share in time alone, and of equals the first.
    """

    def worth(arm: Arm) -> tuple[float, ...]:
        found = arm.found
        if by_goodput:
            return not arm.void, found.share
        rate = 0.0 if arm.measured else arm.predicted.highest_rate or 0.0
        return not arm.void, rate, found.share, -np.inf if found.strain is None else -found.strain

    return max([arm for arm in arms if arm.measured] or arms, key=worth)


def error_of(arm: Arm, prediction: Prediction) -> PredictionError:
    """Of an arm that was measured."""
    predicted, measured = prediction.figures, arm.measured
    assert measured is not None
    pairs = [
        (predicted.goodput, measured.goodput),
        (predicted.ttft.p50, measured.ttft.p50),
        (predicted.ttft.p90, measured.ttft.p90),
        (predicted.itl.p50, measured.itl.p50),
        (predicted.itl.p90, measured.itl.p90),
    ]
    return PredictionError(
        arm.name, *(None if ours is None or not theirs else ours / theirs - 1 for ours, theirs in pairs)
    )


def table(arms: Sequence[Arm]) -> str:
    """Each number as predicted, and where it was measured also that and the error."""
    rows: Rows = []
    if any(arm.predicted.highest_rate is not None for arm in arms):
        rates = [arm.predicted.highest_rate for arm in arms]
        rows.append(("highest rate, predicted", [_rate(rate) for rate in rates]))
    rows += _compared("in time", arms, lambda found: found.share, _percent)
    if any(arm.measured for arm in arms):
        rows.append(("  95% interval", [_interval(arm.measured) for arm in arms]))
    rows += _compared("goodput", arms, lambda found: found.goodput, _rate)
    for name in ("ttft", "itl", "tpot"):
        for percent in ("p50", "p90"):
            rows += _compared(f"{name.upper()} {percent}", arms, _quantile(name, percent), seconds)
    rows += [
        ("queue time p90, predicted", [seconds(arm.predicted.queue_p90) for arm in arms]),
        ("device busy, predicted", [f"{arm.predicted.busy:.0%}" for arm in arms]),
        ("preemptions, predicted", [f"{arm.predicted.preemptions:,}" for arm in arms]),
        ("refused, predicted", [f"{arm.predicted.refused:,}" for arm in arms]),
        ("prompt tokens from the cache, predicted", [f"{arm.predicted.hit_rate:.1%}" for arm in arms]),
    ]
    return render([arm.name for arm in arms], rows)


def _quantile(name: str, percent: str) -> Callable[[Figures], float | None]:
    def of(found: Figures) -> float | None:
        quantiles: Quantiles = getattr(found, name)
        value: float | None = getattr(quantiles, percent)
        return value

    return of


def _compared(
    name: str, arms: Sequence[Arm], value: Callable[[Figures], float | None], show: Callable[[float | None], str]
) -> Rows:
    predicted = [value(arm.predicted.figures) for arm in arms]
    measured = [value(arm.measured) if arm.measured else None for arm in arms]
    rows: Rows = [(f"{name}, predicted", [show(number) for number in predicted])]
    if any(arm.measured for arm in arms):
        rows.append((f"{name}, measured", [show(number) for number in measured]))
        rows.append(("  error of the prediction", [_error(*pair) for pair in zip(predicted, measured, strict=True)]))
    for what, others in (
        ("  error, rescaled by the warm-up", [arm.rescaled for arm in arms]),
        ("  error with that run's costs", [arm.afterwards for arm in arms]),
    ):
        if any(others):
            values = [value(other.figures) if other else None for other in others]
            rows.append((what, [_error(*pair) for pair in zip(values, measured, strict=True)]))
    return rows


def _error(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.0%}" if predicted is not None and measured else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} req/s"


def _interval(found: Figures | None) -> str:
    return "-" if found is None else f"{found.share_low:.1%} to {found.share_high:.1%}"


def error_text(arms: Sequence[Arm]) -> list[str]:
    """The prediction error of TTFT and ITL over all arms that were measured, and how much of it is the simulator's."""
    measured = [arm for arm in arms if arm.measured]
    lines = [_error_line("prediction error", [error_of(arm, arm.predicted) for arm in measured])]
    rescaled = [error_of(arm, arm.rescaled) for arm in measured if arm.rescaled]
    if rescaled:
        lines.append(_error_line("rescaled by each arm's warm-up", rescaled))
    later = [error_of(arm, arm.afterwards) for arm in measured if arm.afterwards]
    slowdowns = [arm.slowdown for arm in measured if arm.slowdown]
    if later:
        lines.append(_error_line("with the costs of the measured runs themselves", later))
        lines.append(
            f"steps took {min(slowdowns):.2f} to {max(slowdowns):.2f} times as long as when the server was calibrated"
        )
        if not 1 / _DRIFT <= min(slowdowns) <= max(slowdowns) <= _DRIFT:
            lines.append("so the machine was not the same: calibrate again, and let nothing else run on it")
    return lines


def _error_line(what: str, found: Sequence[PredictionError]) -> str:
    values = [
        abs(value)
        for error in found
        for value in (error.ttft_p50, error.ttft_p90, error.itl_p50, error.itl_p90)
        if value is not None
    ]
    if not values:
        return f"{what}: too few requests were answered to tell"
    far = sum(value > _FAR for value in values)
    return (
        f"{what}, TTFT and ITL p50/p90: median {np.median(values):.1%}, largest {max(values):.1%}; {far} of "
        f"{len(values)} beyond {_FAR:.0%}"
    )


def choice_text(chosen: Arm, default: Arm) -> str:
    """Whether it is better than the defaults, and by how much that is known."""
    if chosen is default:
        return "keep your flags as they are: nothing that was tried is better"
    ours, theirs = chosen.found, default.found
    how = "measured" if chosen.measured else "predicted"
    text = f"{how}: {ours.share:.1%} of the requests in time, "
    if chosen.measured and not default.measured:
        return f"{text}and the defaults were not measured"
    text += f"with the defaults {theirs.share:.1%}"
    if chosen.measured and ours.share_low <= theirs.share_high:
        each = f"{ours.requests:,}"
        if theirs.requests != ours.requests:
            each += f" and {theirs.requests:,}"
        text += (
            f"; with {each} requests each that may be chance (the intervals overlap): more --rounds or a "
            "longer trace would tell"
        )
    return text


def ablation_text(chosen: Prediction, default: Prediction, parts: Sequence[Ablation]) -> list[str]:
    """A line for each flag: what the simulator says of the chosen settings without it. All at the same rate."""
    if not parts:
        return []
    lines = [
        f"what each flag contributes, as simulated ({_of(chosen)} with all of them, {_of(default)} with the defaults):"
    ]
    for part in parts:
        lines.append(f"  without {part.flag}: {_of(part.without)}{_verdict(chosen, part.without)}")
    return lines


def _of(prediction: Prediction) -> str:
    found = prediction.figures
    text = f"{found.share:.1%} in time, TTFT p90 {seconds(found.ttft.p90)}, ITL p90 {seconds(found.itl.p90)}"
    if prediction.highest_rate is not None:
        text = f"{prediction.highest_rate:.2f} req/s at {ATTAINMENT:.0%}, {text}"
    return text


def _verdict(chosen: Prediction, without: Prediction) -> str:
    """Said where the shares do not: whether the flag leaves more to spare, or the simulator sees no use of it."""
    if chosen.highest_rate is not None or abs(chosen.figures.share - without.figures.share) > _NOTHING:
        return ""
    ours, theirs = (np.inf if found.strain is None else found.strain for found in (chosen.figures, without.figures))
    if ours < theirs:
        return "; with it the same requests meet the SLO with more to spare"
    return "; the simulator sees no use of it"
