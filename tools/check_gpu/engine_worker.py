"""A process with the engine on the GPU, for `tools.check_gpu.engine_parts`."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch

from config.schema import ModelConfig
from gpu_workers.backends import make_backend
from ipc.control import StartError
from ipc.engine_messages import SamplingSpec
from tools.bench_engine.gpu import MOST_STEPS
from tools.bench_engine.gpu_command import load as load_shape
from tools.bench_engine.gpu_command import measure
from tools.check_gpu.decoded import decode, mismatch
from tools.gpu_kernels.measure import GpuLimits
from tools.gpu_kernels.workers import Answer, Request, serve
from tools.score.model import assemble, load
from tools.score.reference import Score, score_row, tolerance_of

_DTYPE: Literal["bfloat16"] = "bfloat16"
_NUMBERS = ModelConfig(dtype=_DTYPE, kv_dtype=_DTYPE)


def answers(request: Request) -> Iterator[Answer]:
    """To a request with a `reference` one for each of its rows; to one with a `shape` the times of its steps.

    A single one with "failed" when the model can't be had, or "skipped" when the GPU's memory is too small for it.
    """
    try:
        yield from _rows(request) if "reference" in request else _steps(request)
    except torch.cuda.OutOfMemoryError:
        yield {"skipped": "more memory than this GPU has"}
    except (StartError, ValueError, OSError) as error:
        yield {"failed": str(error)}


def _rows(request: Request) -> Iterator[Answer]:
    path, device = Path(request["model"]), request["device"]
    model = load(path, _DTYPE, None, quantization="auto", kv_dtype=_DTYPE, device=device)
    tolerance = tolerance_of(model, _DTYPE)
    rows = [json.loads(line) for line in Path(request["reference"]).read_text().splitlines()]
    # `load` takes the deterministic kernels, and scores are those of one prefill; these are the others.
    faster = make_backend(device, _DTYPE, None, deterministic=False, quantized=True, kv_dtype=_DTYPE)
    decoded = decode(assemble(path, faster, "auto"), rows)
    for row, tokens in zip(rows, decoded, strict=True):
        score = Score()
        score_row(model, row, tolerance, score)
        yield {
            "steps": score.steps,
            "equal": score.rows_equal,
            "worst_error": max(score.errors),
            "mismatches": [
                f"{item.row} step {item.step}: {item.actual} for {item.expected}, margin {item.margin:.3f}"
                for item in score.mismatches
            ]
            + [text for text in [mismatch(row, tokens, tolerance)] if text],
        }


def _steps(request: Request) -> Iterator[Answer]:
    prefill, decode, context = request["prefill"], request["decode"], request["context"]
    model = load_shape(None, request["shape"], max(context + MOST_STEPS, *prefill), _NUMBERS)
    limits = GpuLimits(**request["limits"])
    found = measure(model, _NUMBERS, SamplingSpec(), prefill, decode, context, request["seconds"], limits)
    yield {"times": [asdict(times) for times in found]}


if __name__ == "__main__":
    serve(answers)
