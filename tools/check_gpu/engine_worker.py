"""A process with the engine on the GPU, for `tools.check_gpu.engine_parts`."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from ipc.control import StartError
from tools.bench_engine.gpu import MOST_STEPS
from tools.bench_engine.gpu_command import load as load_shape
from tools.bench_engine.gpu_command import measure
from tools.gpu_kernels.measure import GpuLimits
from tools.gpu_kernels.workers import Answer, Request, serve
from tools.score.model import load
from tools.score.reference import Score, score_row, tolerance_of

_DTYPE = "bfloat16"


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
    model = load(Path(request["model"]), _DTYPE, None, quantized=True, kv_dtype=_DTYPE, device=request["device"])
    tolerance = tolerance_of(model, _DTYPE)
    for line in Path(request["reference"]).read_text().splitlines():
        row = json.loads(line)
        score = Score()
        score_row(model, row, tolerance, score)
        yield {
            "steps": score.steps,
            "equal": score.rows_equal,
            "worst_error": max(score.errors),
            "mismatches": [
                f"{item.row} step {item.step}: {item.actual} for {item.expected}, margin {item.margin:.3f}"
                for item in score.mismatches
            ],
        }


def _steps(request: Request) -> Iterator[Answer]:
    prefill, decode, context = request["prefill"], request["decode"], request["context"]
    model = load_shape(None, request["shape"], max(context + MOST_STEPS, *prefill), quantized=False)
    limits = GpuLimits(**request["limits"])
    found = measure(model, prefill, decode, context, request["seconds"], limits)
    yield {"times": [asdict(times) for times in found]}


if __name__ == "__main__":
    serve(answers)
