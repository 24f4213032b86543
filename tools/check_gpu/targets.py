"""What the GPU kernels are to reach, and whether measured cases do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from tools.gpu_kernels.case import Case
from tools.gpu_kernels.measure import Measured


@dataclass(frozen=True, slots=True)
class Target:
    """`labels`: globs of the cases that it is for.

    `of`: what must be at least `least`. "fraction": of the limit that binds; "speedup": the rival's time over the
    case's; "pair": the same with the case whose label has `pair`'s second text in the place of the first as the rival.
    """

    text: str
    labels: Sequence[str]
    of: Literal["fraction", "speedup", "pair"]
    least: float
    pair: tuple[str, str] = ("", "")

    def holds_for(self, case: Case) -> bool:
        return any(fnmatchcase(case.label, glob) for glob in self.labels)

    def value(self, case: Case, measured: Mapping[str, Measured]) -> float | None:
        """What is compared with `least`; None where it was not measured."""
        mine = measured.get(case.label)
        if mine is None:
            return None
        if self.of == "fraction":
            return mine.fraction
        if self.of == "speedup":
            return mine.speedup
        other = measured.get(case.label.replace(*self.pair))
        return None if other is None else other.seconds / mine.seconds


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one target: in how many of the measured cases it is reached, and the worst of them."""

    text: str
    least: float
    reached: int
    measured: int
    worst: float
    where: str

    @property
    def row(self) -> list[str]:
        """For a table: target, reached in, worst, where."""
        if not self.measured:
            return [self.text, "not measured", "", ""]
        return [self.text, f"{self.reached} of {self.measured}", f"{self.worst:.2f}", self.where]


def judge(targets: Sequence[Target], cases: Sequence[Case], measured: Mapping[str, Measured]) -> list[Verdict]:
    """One verdict a target; `measured` by label."""
    verdicts = []
    for target in targets:
        found = [
            (value, case.label)
            for case in cases
            if target.holds_for(case) and (value := target.value(case, measured)) is not None
        ]
        reached = sum(value >= target.least for value, _ in found)
        worst, where = min(found, default=(0.0, ""))
        verdicts.append(Verdict(target.text, target.least, reached, len(found), worst, where))
    return verdicts


# Of the GPU worker's issue, on an H200; all are ratios within one run.
TARGETS: tuple[Target, ...] = ()
