"""`python -m tools.bench_engine --device cuda`, and the same steps for `tools.check_gpu`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from config.arch import read_arch
from config.schema import ModelArch, ModelConfig
from gpu_workers.backends import make_backend
from gpu_workers.models.llama import LlamaModel
from ipc.engine_messages import SamplingSpec
from tools.bench_engine.gpu import MOST_STEPS, GpuBench, GpuTimes
from tools.bench_engine.random_models import SHAPES, random_model
from tools.bench_kernels.command import say
from tools.gpu_kernels.machine import describe
from tools.gpu_kernels.measure import GpuLimits, Stopwatch, measure_limits
from tools.reports.table import render
from tools.score.model import assemble

HEADER = ["ms", "tok/s", "device", "idle", "kernels", "limit", "by"]
_LIMIT_SECONDS = 0.3


def columns(times: GpuTimes) -> list[str]:
    return [
        f"{times.interval * 1e3:.2f}",
        f"{times.tokens / times.interval:.0f}",
        f"{times.device * 1e3:.2f}",
        f"{times.idle:.1%}",
        "-" if times.over_kernels is None else f"{times.over_kernels:.2f}",
        f"{times.fraction:.2f}",
        times.bound,
    ]


def label(times: GpuTimes) -> str:
    return f"{times.phase} {times.tokens}" + (f" at {times.context}" if times.context else "")


def load(model: Path | None, shape: str | None, max_length: int, numbers: ModelConfig) -> LlamaModel:
    """A checkpoint, or random weights of a shape; raises as `make_backend` and `assemble`."""
    quantized = numbers.quantization != "none"
    backend = make_backend(
        "cuda", numbers.dtype, None, deterministic=False, quantized=quantized, kv_dtype=numbers.kv_dtype
    )
    if model is not None:
        return assemble(model, backend, numbers.quantization)
    assert shape is not None
    return random_model(SHAPES[shape], backend, max_length)


def measure(
    model: LlamaModel,
    numbers: ModelConfig,
    sampling: SamplingSpec,
    prefill: Sequence[int],
    decode: Sequence[int],
    context: int,
    seconds: float,
    limits: GpuLimits,
) -> list[GpuTimes]:
    """All of them, about `seconds` each besides what comes before."""
    longest = max([context + MOST_STEPS if decode else 0, *prefill])
    say("capturing CUDA graphs")
    bench = GpuBench(model, numbers, sampling, max([1, *decode]), context, longest, limits, lambda done: None)
    found = []
    for tokens in prefill:
        say(f"prefill of {tokens} tokens")
        found.append(bench.prefill(tokens, seconds))
    for rows in decode:
        say(f"decode of {rows} rows")
        found.append(bench.decode(rows, context, seconds))
    return found


def bench_gpu(
    path: Path | None,
    shape: str | None,
    numbers: ModelConfig,
    sampling: SamplingSpec,
    prefill: Sequence[int],
    decode: Sequence[int],
    context: int,
    seconds: float,
) -> dict[str, Any]:
    """Measure and print; what is worth keeping."""
    arch: ModelArch = SHAPES[shape] if shape else read_arch(path)  # type: ignore[arg-type]
    longest = max([context + MOST_STEPS if decode else 0, *prefill])
    if longest > arch.max_position:
        raise ValueError(
            f"--prefill and --context + {MOST_STEPS} must not be above {arch.max_position} tokens, the longest that "
            "this model takes"
        )
    say(f"loading {path or shape}")
    model = load(path, shape, longest, numbers)
    device = model.backend.device
    limits = measure_limits(Stopwatch(device), device, _LIMIT_SECONDS)
    machine = describe(device)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(limits.text(), flush=True)
    found = measure(model, numbers, sampling, prefill, decode, context, seconds, limits)
    print(f"\n{render(HEADER, [(label(times), columns(times)) for times in found])}")
    torch.cuda.synchronize()
    in_numbers = {"dtype": numbers.dtype, "kv_dtype": numbers.kv_dtype}
    return {"machine": machine, **in_numbers, "limits": asdict(limits), "results": [asdict(times) for times in found]}
