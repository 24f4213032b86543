"""The GPU kernels: compiled, right, and how fast. Each part is told when it must end, and makes a section."""

import time
from collections.abc import Iterable, Mapping, Sequence

from tools.bench_kernels.command import say
from tools.bench_kernels.gpu import SPEED_HEADER, speed_columns
from tools.bench_kernels.limits import usable_cores
from tools.check_gpu.check import Check
from tools.check_gpu.sections import Section, markdown_table
from tools.check_gpu.targets import TARGETS, judge, reached_text
from tools.compile_kernels.compiled import compile_cases, report
from tools.gpu_kernels.case import Case
from tools.gpu_kernels.device import Ran, run_cases
from tools.gpu_kernels.measure import Measured

_MEASURE_SECONDS = (0.02, 0.2)  # of one case
_OVERHEAD = 3.0  # a case takes so many times the time for which it is measured: its data, its rival, first launches


def compiled(check: Check, until: float) -> Section:
    """All kernels for this GPU, by all cores: later launches find them in Triton's cache."""
    architecture = check.machine.architecture
    found = compile_cases(check.cases, [architecture], check.modules, usable_cores(), say, until=until)
    result = report(found, {}, complete=False)
    rows = []
    for kernel in dict.fromkeys(row.compiled.kernel for row in result.rows):
        of_kernel = [row.compiled for row in result.rows if row.compiled.kernel == kernel]
        rows.append(
            [
                kernel,
                str(len(of_kernel)),
                str(max(each.registers for each in of_kernel)),
                str(max(each.spilled_bytes for each in of_kernel)),
                f"{max(each.shared_bytes for each in of_kernel):,}",
            ]
        )
    spilling = sum(row.compiled.spilled_bytes > 0 for row in result.rows)
    summary = f"{len(result.rows)} for {architecture}, {spilling} of them spill{_left_out(check.cases, found)}"
    header = ["kernel", "compiled", "most registers", "most bytes spilled", "most bytes shared"]
    return Section("Compiled", summary, markdown_table(header, rows), result.problems)


def right(check: Check, until: float) -> Section:
    """Each case against its oracle."""
    running = run_cases(check.process, _units(check.cases), check.modules, check=True, until=until)
    results = _shown(running, len(check.cases))
    check.wrong.update(result.case.label for result in results if result.problem)
    return right_section(check.cases, results)


def right_section(cases: Sequence[Case], results: Sequence[Ran]) -> Section:
    """A row a kernel, and every case that is wrong."""
    rows = []
    for kernel in dict.fromkeys(result.case.kernel for result in results):
        of_kernel = [result for result in results if result.case.kernel == kernel]
        errors = [result.error for result in of_kernel if result.error is not None]
        rows.append(
            [
                kernel,
                str(len(of_kernel)),
                str(sum(bool(result.problem) for result in of_kernel)),
                f"{max(errors):.2g}" if errors else "-",
                f"{max(result.case.tolerance for result in of_kernel):g}",
            ]
        )
    failures = [f"{result.case.label}: {result.problem}" for result in results if result.problem]
    summary = f"{len(results) - len(failures)} of {len(results)} cases{_left_out(cases, results)}"
    return Section(
        "Kernels right",
        summary,
        "Relative error: the largest one over the largest expected value.\n\n"
        + markdown_table(["kernel", "cases", "wrong", "worst relative error", "allowed"], rows),
        failures,
    )


def speed(check: Check, until: float) -> Section:
    """All cases but the wrong ones measured, those with a target first."""
    cases = [case for case in check.cases if case.label not in check.wrong]
    cases.sort(key=lambda case: not any(target.holds_for(case) for target in TARGETS))
    shortest, longest = _MEASURE_SECONDS
    seconds = min(max((until - time.monotonic()) / max(len(cases), 1) / _OVERHEAD, shortest), longest)
    results = run_cases(
        check.process, _units(cases), check.modules, seconds=seconds, limits=check.machine.limits, until=until
    )
    return speed_section(cases, _shown(results, len(cases)))


def speed_section(cases: Sequence[Case], results: Sequence[Ran]) -> Section:
    """A row a case, with its targets beside it."""
    measured = {result.case.label: result.measured for result in results if result.measured is not None}
    rows = [
        [result.case.label, *speed_columns(result), _rival(result), _targets_text(result.case, measured)]
        for result in results
        if result.measured
    ]
    verdicts = judge(TARGETS, cases, measured)
    summary = f"{len(measured)} of {len(results)} cases{_left_out(cases, results)}; {reached_text(verdicts)}"
    header = ["case", *SPEED_HEADER, "rival", "target"]
    return Section(
        "Speed",
        summary,
        "Medians with a cold L2 cache. limit: the time that the bytes would take at the copy bandwidth, or the "
        "operations at the matrix peak,\nover the time measured. speedup: the rival's time over the time measured.\n\n"
        + markdown_table(header, rows),
        [f"{result.case.label}: {result.failed}" for result in results if result.failed],
        verdicts,
    )


def _rival(ran: Ran) -> str:
    error = ran.measured.rival_error if ran.measured else ""
    return f"{ran.case.rival} ({error})" if error else ran.case.rival


def _targets_text(case: Case, measured: Mapping[str, Measured]) -> str:
    found = []
    for target in TARGETS:
        value = target.value(case, measured) if target.holds_for(case) else None
        if value is not None:
            found.append(f"{value:.2f} of {target.least:.2f}: {'reached' if value >= target.least else 'missed'}")
    return ", ".join(found)


def _units(cases: Sequence[Case]) -> list[tuple[Case, int | None]]:
    return [(case, None) for case in cases]


def _shown(results: Iterable[Ran], total: int) -> list[Ran]:
    """All results, each with a line of progress as it comes."""
    found = []
    for number, result in enumerate(results, start=1):
        say(f"{number}/{total} {result.case.label}{': ' + result.problem if result.problem else ''}")
        found.append(result)
    return found


def _left_out(cases: Sequence[Case], done: Sequence[object]) -> str:
    missing = len(cases) - len(done)
    return f"; no time for {missing} more" if missing else ""
