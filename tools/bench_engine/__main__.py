"""How fast the engine is in this process, without sockets: prefill, decode, and where the time of a step goes."""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from config.arch import read_arch
from config.memory_plan import kv_bytes_per_token
from config.schema import ModelConfig
from config.sources import ConfigError
from gpu_workers.models.llama import LlamaModel
from ipc.control import StartError
from ipc.engine_messages import SamplingSpec
from kernels.cpu.build import BuildError
from tools.arguments import add_numbers, counts, end_with, refuse, tool_parser
from tools.bench_engine.measured import MeasuredBackend, make_measured_backend
from tools.bench_engine.random_models import SHAPES
from tools.bench_engine.steps import BLOCK_SIZE, MOST_STEPS, Steps, StepTimes, attention_operations, positions_seen
from tools.bench_kernels.command import check_common, machine_line, say, write_json
from tools.bench_kernels.limits import Limits, Work, measure_limits, usable_cores
from tools.reports.table import render
from tools.score.model import assemble

_EPILOG = """\
prefill: prompts of random tokens, each in one step, as with a --prefill-chunk of that length. decode: steps of so many
requests that started with prompts of --context tokens. Plans are made beforehand and nothing is sent: what scheduler,
tokenizer and HTTP add is not in these numbers. All values are medians of single steps.

outside   1 - time in the native kernels / time between the starts of two steps (of a prefill: the step's duration)
prepare, forward, sample, rest   the step's parts in us: index arithmetic; the model, native kernels included; the next
          tokens, with --sampling drawn those of temperature 1, top_k 50 and top_p 0.95; what the runner does besides
limit     the time that the work takes at the limits of the machine, measured by the probes of tools.bench_kernels in
          the same run, over the time measured: that of the bytes of weights and KV, or that of the operations (two for
          a multiply-add, at the rates of float32, int16 and int8), whichever is longer; by says which

With --device cuda, steps are launched one behind the other, and these are shown instead:

device    from the arrival of a step's inputs on the GPU to its sampled tokens
idle      share of the time in which the GPU had nothing to do
kernels   a decode step's time on the GPU over the sum of its kernels' times

  python -m tools.bench_engine --model models/SmolLM2-135M-Instruct.Q4_1.gguf
  python -m tools.bench_engine --device cuda --shape llama-3.1-8b --decode 1,64,256 --context 1024 --kv-dtype fp8
  python -m tools.bench_engine --model DIR --quantization none --dtype bfloat16 --decode 1,64 --prefill 512
"""
# Drawn: temperature 1 and the filters that many clients send.
SAMPLING = {
    "greedy": SamplingSpec(),
    "drawn": SamplingSpec(temperature=1.0, top_k=50, top_p=0.95, seed=1),
}
_HEADER = ["ms", "tok/s", "outside", "prepare", "forward", "sample", "rest", "limit", "by"]


@dataclass(frozen=True, slots=True)
class Result:
    """Of steps with so many tokens. The work is None where the kernels are torch's, which tell nothing of it."""

    phase: str  # "prefill" or "decode"
    tokens: int
    context: float  # mean, at the end of the steps
    times: StepTimes
    tokens_per_second: float
    work: Work | None = None
    fraction: float | None = None  # of the limit that binds
    bound: str | None = None

    @property
    def row(self) -> tuple[str, list[str]]:
        times = self.times
        parts = (times.prepare, times.forward, times.sample, times.rest)
        return f"{self.phase} {self.tokens}", [
            f"{times.interval * 1e3:.2f}",
            f"{self.tokens_per_second:.0f}",
            f"{times.outside:.1%}",
            *(f"{part * 1e6:.0f}" for part in parts),
            "-" if self.fraction is None else f"{self.fraction:.2f}",
            self.bound or "-",
        ]


def load_model(
    path: Path,
    kernels: str,
    dtype: str,
    threads: int,
    quantization: str,
    kv_dtype: str,
    progress: Callable[[str], None],
) -> LlamaModel:
    """The model in this process, alone; StartError or ValueError when it can't be loaded."""
    backend = make_measured_backend(kernels, dtype, threads, quantization != "none", kv_dtype, progress)
    return assemble(path, backend, quantization)


class Bench:
    """Measures one model; `limits` are None where the kernels are torch's."""

    def __init__(self, model: LlamaModel, steps: Steps, limits: Limits | None, seconds: float) -> None:
        self._model = model
        self._steps = steps
        self._limits = limits
        self._seconds = seconds

    def prefill(self, tokens: int) -> Result:
        times = self._steps.prefill(tokens, self._seconds)
        arch = self._model.arch
        seen = positions_seen(arch, range(1, tokens + 1))  # causal: each query sees those up to itself
        return self._result("prefill", tokens, 1, tokens, tokens * arch.num_layers, seen, times)

    def decode(self, rows: int, context: int) -> Result:
        times, contexts = self._steps.decode(rows, context, self._seconds)
        seen = rows * positions_seen(self._model.arch, contexts) / len(contexts)
        return self._result("decode", rows, rows, statistics.mean(contexts), seen, seen, times)

    def _result(
        self, phase: str, tokens: int, sampled: int, context: float, kv: float, seen: float, times: StepTimes
    ) -> Result:
        """`kv`: positions read from the pool, `seen`: positions that queries attend to, of all layers together."""
        arch, backend = self._model.arch, self._model.backend
        rate = tokens / times.interval
        if self._limits and isinstance(backend, MeasuredBackend):
            operations: dict[str, float] = dict(backend.operations(tokens, sampled))
            operations["float32_operations"] = operations.get("float32_operations", 0) + attention_operations(
                arch, seen
            )
            kv_bytes = kv * kv_bytes_per_token(arch, backend.kv_dtype) / arch.num_layers
            work = Work(backend.weight_bytes() + kv_bytes, **operations)
            least, bound = self._limits.least_seconds(work)
            return Result(phase, tokens, context, times, rate, work, least / times.interval, bound)
        return Result(phase, tokens, context, times, rate)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("bench_engine", __doc__, _EPILOG)
    parser.add_argument("--model", type=Path, help="directory with safetensors, or a .gguf file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default: cpu)")
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        help="with --device cuda, instead of --model: random weights",
    )
    kv_help = "of the native kernels' KV cache (default: float16, as the server's), or a GPU's (default: as --dtype)"
    add_numbers(parser, "float16", kv_help, gpu=True)
    parser.set_defaults(kernels=None, quantization=None, dtype=None, kv_dtype=None)  # see `_settle`
    parser.add_argument("--threads", type=int, help="compute threads of a CPU (default: usable cores)")
    parser.add_argument(
        "--prefill",
        type=counts(1 << 17),
        default=[128, 512, 1000, 2000],
        help="tokens of prompts (default: 128,512,1000,2000)",
    )
    parser.add_argument("--decode", type=counts(1 << 17), default=[1, 8, 32], help="rows that decode (default: 1,8,32)")
    parser.add_argument("--context", type=int, default=128, help="tokens before those that are decoded (default: 128)")
    parser.add_argument(
        "--sampling",
        choices=SAMPLING,
        default="greedy",
        help="how tokens are chosen (default: greedy; drawn: see below)",
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="how long each case is measured, at most (default: 3)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write limits and results there, too")
    return parser


def _settle(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what the device does not have; defaults for what was not given."""
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        refuse(parser, arguments, ("kernels", "threads"), "of a CPU's kernels, not with --device cuda")
        if arguments.shape:
            refuse(parser, arguments, ("quantization",), "not with --shape, whose weights are no integers")
    defaults = {
        "kernels": "auto",
        "threads": usable_cores(),
        "quantization": "auto",
        "dtype": "bfloat16" if on_gpu else "float32",
        "kv_dtype": (arguments.dtype or "bfloat16") if on_gpu else "float16",
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    dtype, kv_dtype = arguments.dtype, arguments.kv_dtype
    if dtype == ("float32" if on_gpu else "float16"):
        parser.error(f"--dtype {dtype}: not with --device {arguments.device}")
    if on_gpu and kv_dtype not in (dtype, "int8", "fp8"):
        parser.error(f"--kv-dtype {kv_dtype}: on a GPU {dtype}, as --dtype, int8 or fp8")
    if kv_dtype == "fp8" and not on_gpu:
        parser.error("--kv-dtype fp8: with --device cuda only")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print; StartError, ValueError, BuildError, MemoryError or OSError where that is impossible."""
    most_rows = max(arguments.decode, default=0)
    longest = max([arguments.context + MOST_STEPS if most_rows else 0, *arguments.prefill])
    arch = read_arch(arguments.model)
    if longest > arch.max_position:
        raise ValueError(
            f"--prefill and --context + {MOST_STEPS} must not be above {arch.max_position} tokens, the longest that "
            "this model takes"
        )
    say(f"loading {arguments.model}")
    model = load_model(
        arguments.model,
        arguments.kernels,
        arguments.dtype,
        arguments.threads,
        arguments.quantization,
        arguments.kv_dtype,
        say,
    )
    native = isinstance(model.backend, MeasuredBackend)
    limits = measure_limits(arguments.threads, min(arguments.seconds, 1.0), say) if native else None
    row_blocks = -(-(arguments.context + MOST_STEPS) // BLOCK_SIZE)
    num_blocks = max(most_rows * row_blocks, -(-longest // BLOCK_SIZE))
    bench = Bench(
        model,
        Steps(model, max(most_rows, 1), longest, num_blocks, SAMPLING[arguments.sampling]),
        limits,
        arguments.seconds,
    )
    print(machine_line())
    if limits:
        print(limits.text(), flush=True)
    results = []
    for tokens in arguments.prefill:
        say(f"prefill of {tokens} tokens")
        results.append(bench.prefill(tokens))
    for rows in arguments.decode:
        say(f"decode of {rows} rows")
        results.append(bench.decode(rows, arguments.context))
    print(f"\n{render(_HEADER, [result.row for result in results])}")
    content = {
        "kernels": "native" if native else "torch",
        "limits": asdict(limits) if limits else None,
        "results": [asdict(result) for result in results],
    }
    write_json(arguments.json, content)


def run_on_gpu(arguments: argparse.Namespace) -> None:
    """The same on a GPU; StartError where there is none, ConfigError where it can't have compiled kernels."""
    # Not at the top: they import triton, which a CPU needs none of.
    from tools.bench_engine.gpu_command import bench_gpu
    from tools.gpu_kernels.command import check_cache

    check_cache()
    content = bench_gpu(
        arguments.model,
        arguments.shape,
        ModelConfig(dtype=arguments.dtype, kv_dtype=arguments.kv_dtype, quantization=arguments.quantization),
        SAMPLING[arguments.sampling],
        arguments.prefill,
        arguments.decode,
        arguments.context,
        arguments.seconds,
    )
    write_json(arguments.json, content)


def main(argv: list[str] | None = None) -> int:
    """The exit status: 2 when the model or the kernels can't be had."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _settle(parser, arguments)
    check_common(parser, arguments)
    if (arguments.model is None) == (arguments.shape is None):
        parser.error("--model or --shape: one of them, and not both")
    if arguments.shape and arguments.device == "cpu":
        parser.error("--shape: goes with --device cuda only")
    if not (arguments.prefill or arguments.decode):
        parser.error("--prefill and --decode: there is nothing to measure")
    if not 1 <= arguments.context <= 1 << 17:
        parser.error(f"--context: must be from 1 to {1 << 17}, not {arguments.context}")
    if max(arguments.decode, default=0) > 4096:
        parser.error("--decode: at most 4096 rows")
    try:
        (run if arguments.device == "cpu" else run_on_gpu)(arguments)
    except (
        StartError,
        ConfigError,
        ValueError,
        BuildError,
        MemoryError,
        OSError,
        FloatingPointError,
        torch.OutOfMemoryError,
    ) as error:
        say(f"bench_engine: {error}")
        return 2
    return 0


if __name__ == "__main__":
    end_with(main)
