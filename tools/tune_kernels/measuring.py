"""Candidates of settings measured on the GPU, those that are right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.gpu.launch import SHARED_MEMORY
from kernels.gpu.tables import Entry, Shape, entry_index
from tools.compile_kernels.compiled import CompiledCase
from tools.gpu_kernels.case import Case
from tools.gpu_kernels.device import Machine, Ran, run_cases
from tools.gpu_kernels.workers import Worker
from tools.tune_kernels.choosing import key

_SECONDS = 0.03  # for each candidate
_LONGER = 0.2  # for the shipped settings and the best candidates, once more
_BEST = 3


@dataclass(frozen=True, slots=True)
class Tried:
    """A case with its candidates. `seconds` by `key` of the settings that were right; `problems` of the others."""

    label: str
    kernel: str
    shape: Shape
    shipped: str  # the key of the table's settings
    seconds: Mapping[str, float]
    problems: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Tuner:
    """Tries settings on the GPU, by the process `process`, until `until` on the clock of `time.monotonic`."""

    process: Worker
    modules: Sequence[str]
    machine: Machine
    until: float

    def try_case(self, case: Case, shipped: Mapping[str, Any], unfit: Mapping[int, str]) -> Tried | None:
        """The shipped settings and the candidates, but for those `unfit`, checked and measured; None: no time.

        The fastest are measured once more, and for longer, so that not the luckiest of many measurements is taken.
        """
        settings = {candidate: each for candidate, each in enumerate(case.candidates) if key(each) != key(shipped)}
        problems = {key(settings[candidate]): why for candidate, why in unfit.items() if candidate in settings}
        candidates: list[int | None] = [None, *(candidate for candidate in settings if candidate not in unfit)]
        first = self._run(case, candidates, _SECONDS)
        if len(first) < len(candidates):
            return None
        ranked = sorted((ran for ran in first if not ran.problem), key=_seconds)
        again = dict.fromkeys([None, *(ran.candidate for ran in ranked[:_BEST])])
        seconds = {}
        for ran in (*first, *self._run(case, list(again), _LONGER)):
            name = key(shipped if ran.candidate is None else settings[ran.candidate])
            if ran.problem:
                problems[name] = ran.problem
            else:
                seconds[name] = _seconds(ran)
        right = {name: each for name, each in seconds.items() if name not in problems}
        return Tried(case.label, case.kernel, case.shape, key(shipped), right, problems)

    def _run(self, case: Case, candidates: Sequence[int | None], seconds: float) -> list[Ran]:
        units = [(case, candidate) for candidate in candidates]
        ran = run_cases(
            self.process,
            units,
            self.modules,
            check=True,
            seconds=seconds,
            limits=self.machine.limits,
            until=self.until,
        )
        return list(ran)


def _seconds(ran: Ran) -> float:
    assert ran.measured is not None
    return ran.measured.seconds


def shipped_settings(tables: Mapping[str, Sequence[Entry]], case: Case) -> Mapping[str, Any]:
    """The table's settings for the case. ValueError where it has none."""
    entries = tables.get(case.kernel, ())
    index = entry_index(entries, case.shape)
    if index is None:
        raise ValueError(f"the table has no settings for {case.label}, {dict(case.shape)}")
    settings: Mapping[str, Any] = entries[index]["use"]
    return settings


def unfit_candidates(compiled: Sequence[CompiledCase], architecture: str) -> dict[str, dict[int, str]]:
    """Candidates that don't compile, want too much shared memory, or spill where that is no option; and why."""
    found: dict[str, dict[int, str]] = {}
    for each in compiled:
        problem = each.error
        for code in each.compiled:
            if code.shared_bytes > SHARED_MEMORY[architecture]:
                problem = problem or f"{code.shared_bytes:,} bytes of shared memory"
            if each.case.hot and code.spilled_bytes:
                problem = problem or f"spills {code.spilled_bytes} bytes"
        if problem and each.candidate is not None:
            found.setdefault(each.case.label, {})[each.candidate] = problem
    return found
