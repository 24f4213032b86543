"""A process that scores rows of a reference with the model on the GPU, for `tools.check_gpu.parts`."""

import json
from collections.abc import Iterator
from pathlib import Path

from ipc.control import StartError
from tools.gpu_kernels.workers import Answer, Request, serve
from tools.score.model import load
from tools.score.reference import Score, score_row, tolerance_of

_DTYPE = "bfloat16"


def answers(request: Request) -> Iterator[Answer]:
    """One for each row of the file `reference`; a single one with "failed" when `model` can't be loaded."""
    try:
        model = load(Path(request["model"]), _DTYPE, None, quantized=True, kv_dtype=_DTYPE, device=request["device"])
    except (StartError, ValueError, OSError) as error:
        yield {"failed": str(error)}
        return
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


if __name__ == "__main__":
    serve(answers)
