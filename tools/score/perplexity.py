"""Teacher-forced perplexity: exp of the mean negative log-likelihood of each token after the ones before it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from gpu_workers.models.llama import LlamaModel
from tools.score.model import allocate_kv, logits

_LOSS_ROWS = 16  # few enough that their log-probabilities stay in the cache


@dataclass(slots=True)
class Likelihood:
    """Of the pieces so far: scored tokens, and their negative log-likelihoods in nats, added up for each piece."""

    tokens: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)

    def add(self, losses: Sequence[float]) -> None:
        """One piece, by its tokens."""
        self.tokens.append(len(losses))
        self.sums.append(math.fsum(losses))

    @property
    def mean(self) -> float:
        """Nats a token."""
        return math.fsum(self.sums) / sum(self.tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)


class Scorer:
    """Scores pieces of at most `length` tokens with one model."""

    def __init__(self, model: LlamaModel, length: int) -> None:
        self._model = model
        self._kv = allocate_kv(model, length)
        self.likelihood = Likelihood()

    def score(self, piece: list[int]) -> None:
        """Add a piece of T tokens, of which the last T - 1 are scored."""
        self.likelihood.add(token_losses(logits(self._model, self._kv, piece[:-1], 0), piece[1:]))


def token_losses(values: torch.Tensor, targets: list[int]) -> list[float]:
    """Negative log-likelihoods in nats of `targets` [T], each under its row of the logits `values` [T, vocabulary]."""
    ids = torch.tensor(targets)
    losses: list[float] = []
    for start in range(0, len(targets), _LOSS_ROWS):
        rows = slice(start, start + _LOSS_ROWS)
        losses += F.cross_entropy(values[rows], ids[rows], reduction="none").tolist()
    return losses


def ratio(one: Likelihood, other: Likelihood) -> tuple[float, float]:
    """(perplexity of `one` over that of `other`, its standard error), of the same pieces.

    The error is that of another choice of pieces like these, to first order: tokens of one piece are no independent
    samples, pieces are taken to be. Not a number for a single piece.
    """
    difference = one.mean - other.mean
    total, count = sum(one.tokens), len(one.tokens)
    residuals = [
        mine - theirs - difference * tokens
        for mine, theirs, tokens in zip(one.sums, other.sums, one.tokens, strict=True)
    ]
    error = math.nan
    if count > 1:
        error = math.sqrt(math.fsum(value * value for value in residuals) * count / (count - 1)) / total
    return math.exp(difference), math.exp(difference) * error
