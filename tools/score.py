"""Teacher-forced scoring: how far the model's log-probabilities are from those of reference outputs.

`python -m tools.score --model FILE --reference FILE --dtype float32` feeds prompt plus reference output of each row
through the model, in this process. At every output step whose margin (gap between the reference's best two
log-probabilities) is above the tolerance, the best token must be the reference's. The tolerance is that of the dtype's
rounding, or with weights multiplied as integers 0.5.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from config.arch import read_arch
from gpu_workers.backends import make_backend
from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import LocalComm
from gpu_workers.models import model_class
from gpu_workers.models.llama import LlamaModel
from gpu_workers.weights.loader import open_source
from gpu_workers.weights.source import Weights
from ipc.control import StartError

TOLERANCES = {"float32": 0.001, "bfloat16": 0.25}
QUANTIZED_TOLERANCE = 0.5
_BLOCK_SIZE = 16


@dataclass(slots=True)
class Mismatch:
    """A step at which the best token is not the reference's, although its margin is above the tolerance."""

    row: str
    step: int
    margin: float
    expected: int
    actual: int


@dataclass(slots=True)
class Score:
    """Of all rows so far. `errors`: |log-probability - reference| of each step's five best reference tokens."""

    rows: int = 0
    rows_ok: int = 0
    rows_equal: int = 0  # every step's best token is the reference's, whatever its margin
    steps: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def percentile(self, fraction: float) -> float:
        ranked = sorted(self.errors)
        return ranked[min(int(fraction * len(ranked)), len(ranked) - 1)]


def load(
    path: Path,
    dtype: str,
    threads: int | None,
    kernels: str = "auto",
    quantized: bool = False,
    kv_dtype: str = "float32",
) -> LlamaModel:
    """The model in this process, alone; StartError or ValueError when it can't be loaded."""
    arch = read_arch(path)
    backend = make_backend(
        "cpu", dtype, threads, deterministic=True, kernels=kernels, quantized=quantized, kv_dtype=kv_dtype
    )
    weights = Weights(open_source(path), lambda fraction: None)
    return model_class(arch.family)(arch, None, weights, backend, LocalComm())


def output_logprobs(model: LlamaModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Log-probabilities [len(output), vocabulary] before each output token, from one prefill."""
    tokens = prompt + output[:-1]
    count = len(tokens)
    blocks = -(-count // _BLOCK_SIZE)
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(count),
        slots=torch.arange(count),
        query_starts=[0, count],
        context_lens=[count],
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        logits_rows=torch.arange(len(prompt) - 1, count),
    )
    return model.forward(batch, model.allocate_kv(blocks, _BLOCK_SIZE)).log_softmax(-1)


def score_row(model: LlamaModel, row: dict[str, Any], tolerance: float, score: Score) -> None:
    """Add one reference row to `score`."""
    logprobs = output_logprobs(model, row["prompt_ids"], row["output_ids"])
    best = logprobs.argmax(-1).tolist()
    found = [
        Mismatch(row["id"], step, margin, expected, actual)
        for step, (margin, expected, actual) in enumerate(zip(row["margins"], row["output_ids"], best, strict=True))
        if actual != expected and margin > tolerance
    ]
    for step, top in enumerate(row["top5"]):
        ids = torch.tensor([token for token, _ in top])
        reference = torch.tensor([value for _, value in top], dtype=torch.float64)
        score.errors += (logprobs[step, ids].double() - reference).abs().tolist()
    score.rows += 1
    score.rows_ok += not found
    score.rows_equal += best == row["output_ids"]
    score.steps += len(best)
    score.mismatches += found


def score_rows(model: LlamaModel, rows: Iterable[dict[str, Any]], tolerance: float) -> Score:
    """The score of all `rows`."""
    score = Score()
    for row in rows:
        score_row(model, row, tolerance, score)
    return score


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when no row has a mismatch, 1 when one has, 2 when the model can't be loaded."""
    parser = argparse.ArgumentParser(prog="python -m tools.score", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory with safetensors, or a .gguf file")
    parser.add_argument(
        "--reference", type=Path, required=True, help="JSONL with prompt_ids, output_ids, margins, top5"
    )
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), default="float32", help="compute dtype")
    parser.add_argument("--threads", type=int, default=None, help="compute threads (default: torch's choice)")
    parser.add_argument(
        "--quantization",
        choices=("auto", "none"),
        default="auto",
        help="quantized weights are multiplied as integers (auto), or dequantized (none); as of the server",
    )
    parser.add_argument(
        "--kernels", choices=("auto", "native", "torch"), default="auto", help="CPU kernels, as of the server"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="of the native kernels' KV cache; the server's default is float16",
    )
    arguments = parser.parse_args(argv)
    quantized = arguments.quantization == "auto"
    try:
        rows = [json.loads(line) for line in arguments.reference.read_text().splitlines()]
        if not rows:
            raise ValueError(f"{arguments.reference}: there are no rows in this file")
        model = load(
            arguments.model, arguments.dtype, arguments.threads, arguments.kernels, quantized, arguments.kv_dtype
        )
    except (OSError, ValueError, StartError) as error:
        print(f"tools.score: {error}", file=sys.stderr)
        return 2
    integers = model.backend.takes_quantized and not {"int4", "int8"}.isdisjoint(model.arch.formats.layers)
    tolerance = QUANTIZED_TOLERANCE if integers else TOLERANCES[arguments.dtype]
    score = Score()
    started = time.monotonic()
    for number, row in enumerate(rows, start=1):
        score_row(model, row, tolerance, score)
        print(f"{number}/{len(rows)} {row['id']} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    for item in score.mismatches:
        print(f"mismatch {item.row} step {item.step}: {item.actual} for {item.expected}, margin {item.margin:.4f}")
    print(f"rows without a mismatch above margin {tolerance}: {score.rows_ok} of {score.rows}")
    print(f"rows with every token equal: {score.rows_equal} of {score.rows}; steps: {score.steps}")
    mean = sum(score.errors) / len(score.errors)
    print(
        f"log-probability error of the reference's five best: mean {mean:.6f}, p99 {score.percentile(0.99):.6f}, "
        f"worst {max(score.errors):.6f}"
    )
    return 1 if score.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
