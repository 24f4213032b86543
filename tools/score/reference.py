"""How far the model's log-probabilities are from those of reference outputs.

Prompt plus reference output of each row go through the model. At every output step whose margin (gap between the
reference's best two log-probabilities) is above the tolerance, the best token must be the reference's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_workers.models.llama import LlamaModel
from tools.score.model import allocate_kv, logits

TOLERANCES = {"float32": 0.001, "bfloat16": 0.25}
QUANTIZED_TOLERANCE = 0.5


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


def tolerance_of(model: LlamaModel, dtype: str) -> float:
    """That of the dtype's rounding, or of weights that are multiplied as integers."""
    integers = model.backend.takes_quantized and not {"int4", "int8"}.isdisjoint(model.arch.formats.layers)
    return QUANTIZED_TOLERANCE if integers else TOLERANCES[dtype]


def output_logprobs(model: LlamaModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Log-probabilities [len(output), vocabulary] before each output token, from one prefill."""
    tokens = prompt + output[:-1]
    return logits(model, allocate_kv(model, len(tokens)), tokens, len(prompt) - 1).log_softmax(-1)


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
