"""All GPU kernels right and how fast, on the GPU of this machine: one command, no network, one Markdown file.

It compiles every kernel for this GPU with the shipped settings, checks each case against an oracle in float64, has the
model greedily predict the rows of a reference, and measures each case against what copying and multiplying matrices
reach in this run, and against a library where one does the same; then the engine's steps, with random weights.
"""

import argparse
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from config.output_files import check_output
from config.sources import ConfigError
from tools.arguments import end_with, positive, tool_parser
from tools.bench_kernels.command import say
from tools.check_gpu.check import Check
from tools.check_gpu.engine_parts import rows_right, steps_speed
from tools.check_gpu.kernel_parts import compiled, right, right_section, speed
from tools.check_gpu.sections import Section, markdown_table, report
from tools.gpu_kernels.case import Case
from tools.gpu_kernels.command import check_cache, chosen_cases
from tools.gpu_kernels.device import NO_GPU, Machine, machine_of, run_cases, worker
from tools.gpu_kernels.registry import families, first_of_each_kernel
from tools.gpu_kernels.workers import LostError

_EPILOG = """\
  python -m tools.check_gpu --out h200.md
  python -m tools.check_gpu --quick                       one case of each kernel
  python -m tools.check_gpu --only 'decode_attention/*'
  python -m tools.check_gpu --interpret                   without a GPU: the small cases, under Triton's interpreter

Exit status: 0; 1 when something is wrong (a target that is missed is not); 2 when there is no GPU.
"""
_REPOSITORY = Path(__file__).resolve().parent.parent.parent
_MODEL = _REPOSITORY / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
# (the part of the time limit that is gone when it must end, the part)
PARTS: tuple[tuple[float, Callable[[Check, float], Section]], ...] = (
    (0.30, compiled),
    (0.50, right),
    (0.57, rows_right),
    (0.80, speed),
    (1.00, steps_speed),
)
# What the interpreter does within seconds.
_SMALL_BYTES, _SMALL_OPERATIONS = 1 << 20, 1e8


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("check_gpu", __doc__, _EPILOG)
    parser.add_argument("--quick", action="store_true", help="of each kernel one case only")
    parser.add_argument("--only", metavar="GLOB", default="*", help="only cases whose KERNEL/NAME matches")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=Path("check_gpu.md"), help="the report (default: check_gpu.md)"
    )
    parser.add_argument(
        "--seconds-limit", type=positive, default=480.0, help="what takes longer is left out, and said (default: 480)"
    )
    parser.add_argument("--interpret", action="store_true", help="only check the small cases, without a GPU")
    parser.add_argument(
        "--model", type=Path, help=f"that the engine is checked with (default: models/{_MODEL.name}, where it is there)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """The exit status, as the epilog says."""
    started = time.monotonic()
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.model is None:
        arguments.model = _MODEL
    elif arguments.interpret:
        parser.error("--model: not with --interpret, which checks kernels only")
    elif not arguments.model.exists():
        parser.error(f"--model {arguments.model}: no such file or directory")
    try:
        check_output("--out", arguments.out)
    except ConfigError as error:
        parser.error(str(error))
    modules = families()
    cases = chosen_cases(parser, modules, arguments.only)
    if arguments.interpret:
        cases = [case for case in cases if _small(case)]
        if not cases:
            parser.error(f"--only {arguments.only}: only large cases have such a label, which --interpret leaves out")
    if arguments.quick:
        cases = first_of_each_kernel(cases)
    if arguments.interpret:
        return _interpret(cases, modules, arguments)
    if not torch.cuda.is_available():
        say(f"check_gpu: {NO_GPU}")
        return 2
    try:
        check_cache()
    except ConfigError as error:
        parser.error(str(error))
    with worker() as process:
        say("measuring what this GPU can do")
        try:
            machine = machine_of(process)
        except LostError as error:
            say(f"check_gpu: the GPU can't be used: {error}")
            return 2
        say(machine.limits.text())
        check = Check(cases, modules, process, machine, arguments.model, _reference())
        sections = [_machine_section(machine)]
        for share, part in PARTS:
            sections.append(part(check, started + share * arguments.seconds_limit))
            say(f"{sections[-1].title}: {sections[-1].summary}")
    return _write(f"GPU check: {machine.described['card']}", sections, arguments.out)


def _small(case: Case) -> bool:
    return case.num_bytes <= _SMALL_BYTES and case.operations <= _SMALL_OPERATIONS


def _reference() -> Path:
    shared = Path(os.environ.get("TOKENMILL_SHARED", _REPOSITORY.parent / "shared"))
    return shared / "reference" / "greedy.jsonl"


def _interpret(cases: list[Case], modules: list[str], arguments: argparse.Namespace) -> int:
    results = []
    until = time.monotonic() + arguments.seconds_limit
    with worker(interpreted=True) as process:
        for result in run_cases(process, [(case, None) for case in cases], modules, check=True, until=until):
            results.append(result)
            say(f"{len(results)}/{len(cases)} {result.case.label}")
    section = right_section(cases, results)
    return _write("GPU kernels under Triton's interpreter", [section], arguments.out)


def _machine_section(machine: Machine) -> Section:
    described = machine.described
    now = datetime.now(UTC)
    limits = machine.limits
    rows = [["date", f"{now:%Y-%m-%d %H:%M} UTC"], *([name, value] for name, value in described.items())]
    rows.append(["copy bandwidth, measured", f"{limits.copy_bytes / 1e9:.0f} GB/s"])
    rows += [[f"{name} matrix peak, measured", f"{rate / 1e12:.0f} T/s"] for name, rate in limits.operations.items()]
    summary = f"{described['card']}, torch {described['torch']}, triton {described['triton']}, {limits.text()}"
    return Section("Machine", summary, markdown_table(["", ""], rows))


def _write(heading: str, sections: list[Section], out: Path) -> int:
    out.write_text(report(heading, sections))
    failures = [f"{section.title}: {text}" for section in sections for text in section.failures]
    for text in failures:
        print(f"wrong: {text}")
    for section in sections:
        print(f"{section.title}: {section.summary}")
    print(f"written: {out}")
    return 1 if failures else 0


if __name__ == "__main__":
    end_with(main)
