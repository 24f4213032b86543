"""Settings of the GPU kernels chosen anew by measuring them on the GPU of this machine.

Compiles each case's candidates, leaves out those that spill or don't fit, checks the results of the others against an
oracle, and times them against the shipped settings, with a cold L2 cache. Prints what would be gained; --write puts it
into kernels/gpu/tables. Which of a library and a kernel of ours is the faster one for a shape is a setting like others.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from config.output_files import check_output
from config.sources import ConfigError
from kernels.gpu.tables import FOLDER, Entry, entries, entry_index
from tools.arguments import count, end_with, positive, tool_parser
from tools.bench_kernels.command import say
from tools.bench_kernels.limits import usable_cores
from tools.compile_kernels.compiled import compile_cases
from tools.gpu_kernels.command import check_cache
from tools.gpu_kernels.device import NO_GPU, machine_of, worker
from tools.gpu_kernels.machine import stamp
from tools.gpu_kernels.registry import families, load_cases
from tools.gpu_kernels.workers import LostError
from tools.reports.table import render
from tools.tune_kernels.choosing import Point, key, retuned
from tools.tune_kernels.files import rewrite
from tools.tune_kernels.measuring import Tried, Tuner, shipped_settings, unfit_candidates
from tools.tune_kernels.times import Times, read_times, write_times

_EPILOG = """\
  python -m tools.tune_kernels --only 'prefill_attention/*' --times times.json
  python -m tools.tune_kernels --from times.json --write         later, and with no GPU

now    time with the shipped settings, in us     best   with the fastest ones for this shape alone
new    with those of the new table, whose entries are for ranges of shapes: see docs/gpu.md

Exit status: 0; 2 when there is no GPU, or nothing to choose from.
"""


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("tune_kernels", __doc__, _EPILOG)
    parser.add_argument("--only", metavar="GLOB", default="*", help="only cases whose KERNEL/NAME matches")
    parser.add_argument("--write", action="store_true", help="rewrite the files of kernels/gpu/tables/ARCHITECTURE")
    parser.add_argument("--times", type=Path, metavar="FILE", help="write all measured times there")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="take the times from there instead")
    parser.add_argument("--seconds-limit", type=positive, default=float("inf"), help="cases after that are left out")
    parser.add_argument(
        "--jobs", type=count, default=usable_cores(), help="processes that compile (default: one a core)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """The exit status, as the epilog says."""
    started = time.monotonic()
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.times and arguments.source:
        parser.error("--times: not with --from, with which nothing is measured")
    try:
        if arguments.times:
            check_output("--times", arguments.times)
        for file in FOLDER.glob("*/*.json") if arguments.write else ():
            check_output("--write", file)
    except ConfigError as error:
        parser.error(str(error))
    if arguments.source is None and not torch.cuda.is_available():
        say(f"tune_kernels: {NO_GPU}")
        return 2
    try:
        if arguments.source is None:
            check_cache()
            times = _measured(arguments, started + arguments.seconds_limit)
        else:
            times = read_times(arguments.source, arguments.only)
    except (ConfigError, LostError, OSError, ValueError) as error:
        say(f"tune_kernels: {error}")
        return 2
    if arguments.times:
        write_times(arguments.times, times)
    tuned = _tuned(times)
    print(_text(times, tuned))
    if arguments.write:
        for file in rewrite(FOLDER / times.architecture, tuned, times.measured):
            print(f"written: {file}")
    return 0


def _measured(arguments: argparse.Namespace, until: float) -> Times:
    """ValueError where no case has candidates, or there was no time for any."""
    modules = families()
    cases = [case for case in load_cases(modules, arguments.only) if case.candidates]
    if not cases:
        raise ValueError(f"--only {arguments.only}: no case with such a label has candidates")
    with worker() as process:
        machine = machine_of(process)
        say(machine.limits.text())
        architecture = machine.architecture
        compiled = compile_cases(cases, [architecture], modules, arguments.jobs, say, candidates=True, until=until)
        unfit = unfit_candidates(compiled, architecture)
        tuner = Tuner(process, modules, machine, until)
        found: list[Tried] = []
        for case in cases:
            tried = tuner.try_case(case, shipped_settings(entries(architecture), case), unfit.get(case.label, {}))
            if tried is None:
                say(f"no time for {len(cases) - len(found)} of {len(cases)} cases")
                break
            found.append(tried)
            say(f"{len(found)}/{len(cases)} {case.label}: {len(tried.seconds)} settings, {len(tried.problems)} wrong")
    if not found:
        raise ValueError(f"--seconds-limit {arguments.seconds_limit:g}: no time for any of {len(cases)} cases")
    now = datetime.now(UTC)
    return Times(stamp(machine.described, f"{now:%Y-%m-%d}"), architecture, found)


def _tuned(times: Times) -> dict[str, list[Entry]]:
    """The new entries of each measured kernel."""
    tables = entries(times.architecture)
    return {
        kernel: retuned(
            tables[kernel], [Point(tried.shape, tried.seconds) for tried in times.cases if tried.kernel == kernel]
        )
        for kernel in dict.fromkeys(tried.kernel for tried in times.cases)
    }


def _text(times: Times, tuned: Mapping[str, Sequence[Entry]]) -> str:
    """A table of all cases, and what was wrong."""
    rows = []
    for tried in times.cases:
        index = entry_index(tuned[tried.kernel], tried.shape)
        assert index is not None
        use = key(tuned[tried.kernel][index]["use"])
        shipped, new = tried.seconds.get(tried.shipped), tried.seconds.get(use)
        gain = f"{shipped / new - 1:+.1%}" if shipped and new else "-"
        best = min(tried.seconds.values(), default=None)
        rows.append((tried.label, [_microseconds(shipped), _microseconds(best), _microseconds(new), gain, use]))
    problems = [
        f"{tried.label} with {settings}: {problem}"
        for tried in times.cases
        for settings, problem in tried.problems.items()
    ]
    return "\n".join([render(["now", "best", "new", "gain", "settings"], rows), *problems])


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


if __name__ == "__main__":
    end_with(main)
