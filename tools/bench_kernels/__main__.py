"""How fast the kernels are, each alone: times, rates, and the fraction of what this machine can do at most.

Those of the CPU, or with --device cuda those of the GPU.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kernels.cpu.build import BuildError
from kernels.cpu.library import GROUP, load
from tools.arguments import end_with, refuse, tool_parser
from tools.bench_kernels.cases import Case, Place, all_cases
from tools.bench_kernels.command import check_common, machine_line, say, write_json
from tools.bench_kernels.gpu import bench_gpu
from tools.bench_kernels.limits import Limits, Work, last_level_cache, measure_limits, usable_cores
from tools.bench_kernels.timing import median_seconds
from tools.bench_kernels.weights import Weights
from tools.reports.table import render

_EPILOG = """\
On the CPU small probes first measure what the machine can do in this run, with the same threads: read memory, multiply
and add float32 in registers, and 16-bit and 8-bit integers as the kernels of int8 and int4 weights do. Then come:

linear, gated, logits / KIND / NxK / ROWS   products with a packed [N, K] weight
greedy / KIND / NxK / ROWS      those of logits, of which only the ids of the largest are kept
norm / WIDTH / ROWS             sum with the residual and RMSNorm, quantized as for a product
rope / KV-TYPE / ROWS           rotation, and the writing of keys and values
decode / KV-TYPE / SEQUENCESxCONTEXT              attention, whole or, where wWINDOW follows, to the last positions
prefill / KV-TYPE / TOKENS@POSITION-OF-THE-FIRST  likewise
embed / KIND / NxK / ROWS       rows of the vocabulary's table

GB/s counts the weights and KV that an operation reads (of norm and rope the activations), GOP/s two for a multiply-add.
limit is the fraction: the time that bytes or operations would take at the measured limits, whichever is longer, over
the measured time; by says which. Weights and KV are taken from copies that fill several times the last-level cache, one
after the other, so that a product with one row reads memory, as it does in a step. The data of norm, rope and embed is
small and may be in a cache: theirs may be above 1.

On the GPU the limits are what copying and multiplying large matrices reach in this run. The cases are those of
tools/gpu_kernels, called KERNEL/NAME, and are measured with a cold L2 cache; speedup is the time of a library that does
the same over that of the kernel. --threads and --shape are for the CPU.

  python -m tools.bench_kernels                        all of it, some minutes
  python -m tools.bench_kernels --only '*/int4/*/1'    products of one row with int4 weights
  python -m tools.bench_kernels --only 'decode/*' --threads 1
  python -m tools.bench_kernels --only 'linear/*' --shape 4096 4096
  python -m tools.bench_kernels --device cuda --only 'prefill_attention/*'
"""
_CACHES = 3  # weights and KV fill so many times the last-level cache
_MOST_VALUES = 1 << 28  # of a weight


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one operation: its work and its median time."""

    name: str
    seconds: float
    work: Work
    fraction: float  # of the limit that binds
    bound: str  # which: "memory" or "compute"


def measure(case: Case, place: Place, limits: Limits, seconds: float) -> Measured:
    """The case's median time within about `seconds`, compared with the limits."""
    recorded = case.record(place)
    median = median_seconds(recorded.engine, recorded.ops, recorded.step, seconds)
    work = recorded.work
    least, bound = limits.least_seconds(work)
    return Measured(
        case.name,
        median,
        work,
        least / median,
        bound,
    )


def table(results: Sequence[Measured]) -> str:
    rows = [
        (
            result.name,
            [
                f"{result.seconds * 1e6:.1f}",
                f"{result.work.num_bytes / result.seconds / 1e9:.1f}",
                f"{result.work.operations / result.seconds / 1e9:.1f}",
                f"{result.fraction:.2f}",
                result.bound,
            ],
        )
        for result in results
    ]
    return render(["us", "GB/s", "GOP/s", "limit", "by"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("bench_kernels", __doc__, _EPILOG)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--threads", type=int, help="compute threads of a CPU (default: usable cores)")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="how long each kernel and each limit is measured (default: 0.2)"
    )
    parser.add_argument("--only", metavar="GLOB", default="*", help="only cases whose name matches")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=2,
        metavar=("N", "K"),
        action="append",
        default=[],
        help="products with [N, K] weights instead of those of the model; may be given several times",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write limits and results there, too")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The exit status: 2 when the kernels can't be had, or there is no GPU for --device cuda."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda":
        refuse(parser, arguments, ("threads", "shape"), "of a CPU's kernels, not with --device cuda")
    if arguments.threads is None:
        arguments.threads = usable_cores()
    check_common(parser, arguments)
    if arguments.device == "cuda":
        return bench_gpu(parser, arguments)
    for n, k in arguments.shape:
        if min(n, k) < 1 or n * k > _MOST_VALUES or k % GROUP:
            parser.error(f"--shape {n} {k}: N and K must be positive, K a multiple of {GROUP}, N * K at most 2^28")
    cases = [case for case in all_cases(arguments.shape) if fnmatchcase(case.name, arguments.only)]
    if not cases:
        parser.error(f"--only {arguments.only}: no case has such a name; for example {all_cases(())[0].name}")
    try:
        library = load(say)
        limits = measure_limits(arguments.threads, arguments.seconds, say)
        working_set = _CACHES * last_level_cache()
        place = Place(library, arguments.threads, Weights(library, working_set), working_set)
        print(machine_line())
        print(limits.text(), flush=True)
        results = []
        for number, case in enumerate(cases, start=1):
            say(f"{number}/{len(cases)} {case.name}")
            results.append(measure(case, place, limits, arguments.seconds))
        print(f"\n{table(results)}")
        write_json(arguments.json, {"limits": asdict(limits), "cases": [asdict(result) for result in results]})
    except (BuildError, MemoryError, OSError) as error:
        say(f"bench_kernels: {error}")
        return 2
    return 0


if __name__ == "__main__":
    end_with(main)
