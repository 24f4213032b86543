"""The benchmark of the GPU kernels: `python -m tools.bench_kernels --device cuda`."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict

import torch

from config.sources import ConfigError
from tools.bench_kernels.command import say, write_json
from tools.gpu_kernels.command import check_cache, chosen_cases
from tools.gpu_kernels.device import NO_GPU, Ran, machine_of, run_cases, worker
from tools.gpu_kernels.registry import families
from tools.gpu_kernels.workers import LostError
from tools.reports.table import render


def bench_gpu(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Measure all cases that --only matches, each for --seconds. The exit status: 2 without a GPU."""
    modules = families()
    cases = chosen_cases(parser, modules, arguments.only)
    if not torch.cuda.is_available():
        say(f"bench_kernels: {NO_GPU}")
        return 2
    results = []
    try:
        check_cache()
        with worker() as process:
            machine = machine_of(process)
            print(", ".join(f"{name} {value}" for name, value in machine.described.items()))
            print(machine.limits.text(), flush=True)
            units = [(case, None) for case in cases]
            for ran in run_cases(process, units, modules, seconds=arguments.seconds, limits=machine.limits):
                results.append(ran)
                say(f"{len(results)}/{len(cases)} {ran.case.label}")
    except ConfigError as error:
        parser.error(str(error))
    except LostError as error:
        say(f"bench_kernels: the GPU can't be used: {error}")
        return 2
    print(f"\n{gpu_table(results)}")
    content = {
        "machine": machine.described,
        "limits": asdict(machine.limits),
        "cases": [
            {"name": ran.case.label, "failed": ran.failed, **(asdict(ran.measured) if ran.measured else {})}
            for ran in results
        ],
    }
    write_json(arguments.json, content)
    return 0


def gpu_table(results: Sequence[Ran]) -> str:
    """A line a case; those that failed below."""
    rows = [(ran.case.label, [*speed_columns(ran), ran.case.rival]) for ran in results if ran.measured]
    failed = [f"{ran.case.label}: {ran.failed}" for ran in results if ran.failed]
    return "\n".join([render([*SPEED_HEADER, "rival"], rows), *failed])


SPEED_HEADER = ("us", "GB/s", "TFLOP/s", "limit", "by", "speedup")


def speed_columns(ran: Ran) -> list[str]:
    """Of a case that was measured: its time, rates, fraction of the limit that binds, and the rival's time over its."""
    case, measured = ran.case, ran.measured
    assert measured is not None
    return [
        f"{measured.seconds * 1e6:.1f}",
        f"{case.num_bytes / measured.seconds / 1e9:.0f}",
        f"{case.operations / measured.seconds / 1e12:.1f}",
        f"{measured.fraction:.2f}",
        measured.bound,
        "-" if measured.speedup is None else f"{measured.speedup:.2f}",
    ]
