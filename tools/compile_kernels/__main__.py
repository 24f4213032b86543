"""Every GPU kernel compiled with the settings that are shipped, for GPUs that need not be here.

Prints the registers, shared memory and spilled bytes of each machine code. It is an error when a kernel can't be
compiled, wants more shared memory than a thread block may have, or spills although it runs in each layer or step; and
when the shipped tables have settings that no case of tools/gpu_kernels reaches.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from config.output_files import check_output
from config.sources import ConfigError
from kernels.gpu.launch import TARGETS
from kernels.gpu.tables import entries
from tools.arguments import count, end_with, tool_parser
from tools.bench_kernels.command import say, write_json
from tools.bench_kernels.limits import usable_cores
from tools.compile_kernels.compiled import Report, Row, compile_cases, report, settings
from tools.gpu_kernels.command import check_cache, chosen_cases
from tools.gpu_kernels.registry import families, first_of_each_kernel
from tools.reports.table import render

_EPILOG = """\
regs     registers of a thread; of gfx942 those of the vector unit
spilled  bytes of a thread that are written to and read from memory for want of registers
shared   bytes of a thread block, and how much of what the GPU gives one that is
case     the first one that runs it; dtypes are not among the constants

  python -m tools.compile_kernels                                     all of it, many minutes
  python -m tools.compile_kernels --quick --architecture sm_90        one case of each kernel
  python -m tools.compile_kernels --only 'prefill_attention/*' --architecture sm_90 gfx942

Needs no GPU. What was compiled is kept in Triton's cache (TRITON_CACHE_DIR, or ~/.triton/cache).
Exit status: 0, or 1 when there is an error.
"""
_HEADER = ("regs", "spilled", "shared", "of limit", "case")


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("compile_kernels", __doc__, _EPILOG)
    parser.add_argument(
        "--architecture", nargs="+", choices=tuple(TARGETS), default=tuple(TARGETS), help="default: all of them"
    )
    parser.add_argument("--only", metavar="GLOB", default="*", help="only cases whose KERNEL/NAME matches")
    parser.add_argument("--quick", action="store_true", help="of each kernel one case only")
    parser.add_argument("--jobs", type=count, default=usable_cores(), help="processes (default: usable cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 when something is wrong with a kernel or a table."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    modules = families()
    cases = chosen_cases(parser, modules, arguments.only)
    try:
        if arguments.json:
            check_output("--json", arguments.json)
        check_cache()
    except ConfigError as error:
        parser.error(str(error))
    if arguments.quick:
        cases = first_of_each_kernel(cases)
    architectures = list(dict.fromkeys(arguments.architecture))
    compiled = compile_cases(cases, architectures, modules, arguments.jobs, say)
    complete = arguments.only == "*" and not arguments.quick
    found = report(compiled, {name: entries(name) for name in architectures}, complete)
    print(_text(found, architectures))
    write_json(arguments.json, {"compiled": [_plain(row) for row in found.rows], "problems": found.problems})
    return 1 if found.problems else 0


def _plain(row: Row) -> dict[str, object]:
    return {
        "case": row.label,
        "architecture": row.architecture,
        "hot": row.hot,
        "shared_limit": row.limit,
        **asdict(row.compiled),
    }


def _text(found: Report, architectures: Sequence[str]) -> str:
    parts = []
    for architecture in architectures:
        rows = [row for row in found.rows if row.architecture == architecture]
        parts.append(f"{architecture}, {len(rows)} compiled\n{_table(rows)}\n")
    parts += [f"error: {problem}" for problem in found.problems]
    spilling = sum(row.compiled.spilled_bytes > 0 for row in found.rows)
    parts.append(f"{len(found.rows)} compiled, {spilling} of them spill; errors: {len(found.problems)}")
    return "\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    """A line a machine code, under its kernel and what all codes of that one have in common."""
    lines: list[tuple[str, list[str]]] = []
    for kernel, group in groupby(rows, lambda row: row.compiled.kernel):
        codes = [(row, settings(row.compiled)) for row in group]
        common = [text for text in codes[0][1] if all(text in texts for _, texts in codes)]
        lines.append((f"{kernel} {' '.join(common)}", [""] * len(_HEADER)))
        for row, texts in codes:
            lines.append((f"  {' '.join(text for text in texts if text not in common)}", _columns(row)))
    return render(_HEADER, lines)


def _columns(row: Row) -> list[str]:
    code = row.compiled
    share = f"{code.shared_bytes / row.limit:.0%}"
    return [str(code.registers), str(code.spilled_bytes), f"{code.shared_bytes:,}", share, row.label]


if __name__ == "__main__":
    end_with(main)
