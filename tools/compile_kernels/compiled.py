"""Kernels compiled for architectures by several processes, and what is wrong with them."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from kernels.gpu.launch import SHARED_MEMORY, Compilation
from kernels.gpu.tables import Entry, Shape, entry_index
from tools.gpu_kernels.case import Case
from tools.gpu_kernels.workers import Answer, Request, Worker, ask_all

_WORKER = "tools.compile_kernels.worker"
_SECONDS = 300.0  # for one case, or one candidate
_UNITS = 16  # cases or candidates in a request


@dataclass(frozen=True, slots=True)
class CompiledCase:
    """What launching a case compiles, the settings that it asks for, and why it could not be compiled, or ""."""

    case: Case
    candidate: int | None  # which of the case's settings was tried; None: those of the table
    architecture: str
    compiled: Sequence[Compilation]
    asked: Sequence[tuple[str, Shape]]
    error: str

    @property
    def unasked(self) -> str:
        """That settings were never chosen by the case's own kernel and shape, or ""."""
        if (self.case.kernel, dict(self.case.shape)) in [(kernel, dict(shape)) for kernel, shape in self.asked]:
            return ""
        return f"settings are asked for {list(self.asked)}, not for the case's {dict(self.case.shape)}"


@dataclass(frozen=True, slots=True)
class Row:
    """One machine code. `label`: of the first case that runs it; `hot`: one of them must not spill."""

    label: str
    architecture: str
    hot: bool
    compiled: Compilation

    @property
    def limit(self) -> int:
        """Bytes of shared memory that it may have."""
        return SHARED_MEMORY[self.architecture]

    @property
    def problem(self) -> str:
        """What is wrong with it, or ""."""
        found = []
        if self.compiled.shared_bytes > self.limit:
            found.append(f"{self.compiled.shared_bytes:,} bytes of shared memory, above {self.limit:,}")
        if self.hot and self.compiled.spilled_bytes:
            found.append(f"spills {self.compiled.spilled_bytes} bytes")
        return " and ".join(found)


@dataclass(slots=True)
class Report:
    """Of all architectures. `problems`: each in words, the reason for an exit status of 1."""

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def compile_cases(
    cases: Sequence[Case],
    architectures: Sequence[str],
    modules: Sequence[str],
    jobs: int,
    progress: Callable[[str], None],
    candidates: bool = False,
    until: float = float("inf"),
) -> list[CompiledCase]:
    """All `cases` on all `architectures`; `candidates`: with each of their candidates instead of the table's settings.

    What has not begun at `until`, on the clock of `time.monotonic`, is left out. Triton keeps what was compiled in its
    cache (TRITON_CACHE_DIR), so that a later launch on such a device finds it there.
    """
    known = {case.label: case for case in cases}
    requests: list[Request] = [
        {"modules": list(modules), "architecture": architecture, "units": units}
        for architecture in architectures
        for units in _parts(cases, candidates)
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = []
    started = time.monotonic()
    total = sum(len(request["units"]) for request in requests)
    with ExitStack() as ended:
        workers = [ended.enter_context(Worker(_WORKER, environment)) for _ in range(max(min(jobs, len(requests)), 1))]
        for number, result in enumerate(ask_all(workers, requests, _SECONDS, until), start=1):
            (label, candidate), architecture = result.unit, result.request["architecture"]
            answer = result.answer or {"compiled": [], "asked": [], "error": result.lost}
            found.append(_compiled_case(known[label], candidate, architecture, answer))
            progress(f"{number}/{total} {architecture} {label} {time.monotonic() - started:.0f} s")
    return found


def _parts(cases: Sequence[Case], candidates: bool) -> Iterator[list[tuple[str, int | None]]]:
    """Labels of cases, and numbers of their candidates, in requests.

    Those of one kernel with the same candidate are together, as many of them are the same code; not too many, so that
    processes share them.
    """
    by_code: dict[tuple[str, int | None], list[tuple[str, int | None]]] = {}
    for case in cases:
        numbers: Sequence[int | None] = range(len(case.candidates)) if candidates else (None,)
        for number in numbers:
            by_code.setdefault((case.kernel, number), []).append((case.label, number))
    for units in by_code.values():
        for start in range(0, len(units), _UNITS):
            yield units[start : start + _UNITS]


def _compiled_case(case: Case, candidate: int | None, architecture: str, answer: Answer) -> CompiledCase:
    return CompiledCase(
        case,
        candidate,
        architecture,
        [Compilation(**each) for each in answer["compiled"]],
        [(kernel, shape) for kernel, shape in answer["asked"]],
        answer["error"],
    )


def report(
    compiled: Sequence[CompiledCase], tables: Mapping[str, Mapping[str, Sequence[Entry]]], complete: bool
) -> Report:
    """Each machine code once. `complete`: all cases are there, and what none of them reaches in `tables` is wrong."""
    result = Report()
    seen: dict[tuple[str, str], Row] = {}
    for each in compiled:
        problem = each.error or each.unasked
        if problem:
            result.problems.append(f"{each.architecture} {each.case.label}: {problem}")
        for code in each.compiled:
            key = each.architecture, code.hash
            before = seen.get(key, Row(each.case.label, each.architecture, False, code))
            seen[key] = replace(before, hot=before.hot or each.case.hot)
    result.rows = sorted(seen.values(), key=_order)
    result.problems += [
        f"{row.architecture} {row.compiled.kernel} {settings_text(row.compiled)}: {row.problem}"
        for row in result.rows
        if row.problem
    ]
    if complete:
        for architecture, kernels in tables.items():
            asked = [pair for each in compiled if each.architecture == architecture for pair in each.asked]
            result.problems += [f"{architecture} {text}" for text in _unreached(kernels, asked)]
    return result


def _order(row: Row) -> tuple[str, str, str]:
    return row.architecture, row.compiled.kernel, settings_text(row.compiled)


def _unreached(kernels: Mapping[str, Sequence[Entry]], asked: Iterable[tuple[str, Shape]]) -> list[str]:
    """The entries that no case asks for, in words."""
    reached = set()
    for kernel, shape in asked:
        with suppress(KeyError):  # of a kernel or parameter that the table lacks, which the case itself ended with
            reached.add((kernel, entry_index(kernels[kernel], shape)))
    return [
        f"{kernel}: no case reaches entry {index + 1} of its settings, {dict(entry)}"
        for kernel, entries in kernels.items()
        for index, entry in enumerate(entries)
        if (kernel, index) not in reached
    ]


def settings_text(compiled: Compilation) -> str:
    return " ".join(settings(compiled))


def settings(compiled: Compilation) -> list[str]:
    """The constants that it was compiled with."""
    constants = {**compiled.constants, "num_warps": compiled.num_warps, "num_stages": compiled.num_stages}
    return [f"{name}={value}" for name, value in constants.items()]
