"""Log-probabilities of prompts: of each token but the first, what the model gave it after those before.

They are those of the model's own logits: nothing that a request asks of the sampler changes them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.rows import Ints, PlanError, Rows, int32_columns
from gpu_workers.sampling import NOT_NUMBERS, best_ids
from ipc.engine_messages import NewRow, PromptScores

# Logits of a whole chunk would take hundreds of megabytes. The compiled kernels read the head once for so many rows.
ROWS_AT_ONCE = 48


class TokenScores(NamedTuple):
    """Of R tokens, where the logits were computed."""

    chosen: torch.Tensor  # [R] float32, the log-probability of each
    ranks: torch.Tensor  # [R] int32, one more than the number of tokens that are more probable
    top_ids: torch.Tensor  # [R, k] int32, of the most probable tokens, best first and of equals the lowest
    top_values: torch.Tensor  # [R, k] float32, theirs


class Device(Protocol):
    """What computes logits: see `gpu_workers.backend.Backend`."""

    def score(self, logits: torch.Tensor, token_ids: Ints, k: int) -> TokenScores: ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[Any]]]: ...


class _Wanted:
    """What a row still wants."""

    __slots__ = ("alternatives", "num_prompt", "num_scored")

    def __init__(self, alternatives: int, num_prompt: int, num_scored: int) -> None:
        self.alternatives = alternatives
        self.num_prompt = num_prompt
        self.num_scored = num_scored


class PromptScorer:
    """Knows which rows want log-probabilities of their prompts, and computes them a few rows of logits at a time."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._wanted: dict[int, _Wanted] = {}

    def add(self, new: NewRow) -> None:
        """Take note of what a new row wants; `PlanError` for impossible numbers."""
        self._wanted.pop(new.row, None)
        k = new.sampling.prompt_logprobs
        if not -1 <= k <= self._rows.vocab_size:
            raise PlanError(f"new_rows: row {new.row}: prompt_logprobs {k} is outside -1..{self._rows.vocab_size}")
        if not 0 <= new.num_scored <= new.num_prompt - 1:
            raise PlanError(f"new_rows: row {new.row}: num_scored {new.num_scored} of {new.num_prompt} prompt tokens")
        if k >= 0 and new.num_scored < new.num_prompt - 1:
            self._wanted[new.row] = _Wanted(k, new.num_prompt, new.num_scored)

    def free(self, rows: list[int]) -> None:
        for row in rows:
            self._wanted.pop(row, None)

    def scores(
        self,
        scheduled: bytes,
        logits_of: Callable[[NDArray[np.int64]], torch.Tensor],
        device: Device,
        *,
        keep: bool,
    ) -> Callable[[], tuple[PromptScores, ...]]:
        """Of the rows of a plan that has just been carried out; what is returned waits for the device to have them.

        `logits_of` gives the logits [R, vocabulary] of R flat tokens of its batch; ranks all call it in the same way,
        but only with `keep` is anything made of what it returns. Waiting raises FloatingPointError where the model
        computed NaN.
        """
        if not self._wanted:
            return tuple
        found = []
        for index, first, where, token_ids, k in self._due(int32_columns(scheduled, 4, "scheduled")):
            parts = []
            for begin in range(0, len(where), ROWS_AT_ONCE):
                some = slice(begin, begin + ROWS_AT_ONCE)
                logits = logits_of(where[some])
                if keep:
                    parts.append(device.score(logits, token_ids[some], k))
            if keep:
                found.append((index, first, [torch.cat(column) for column in zip(*parts, strict=True)]))
        if not found:
            return tuple
        arrive = device.fetch([column for _, _, columns in found for column in columns])

        def arrived() -> tuple[PromptScores, ...]:
            arrays = iter(arrive())
            return tuple(
                _prompt_scores(index, first, *(next(arrays) for _ in columns)) for index, first, columns in found
            )

        return arrived

    def _due(self, columns: Ints) -> Iterator[tuple[int, int, NDArray[np.int64], Ints, int]]:
        """(entry of the plan, position of the first token, flat tokens whose logits tell of them, the tokens, k)."""
        flat = 0
        for index, (row, start, count, _) in enumerate(columns.tolist()):
            wanted = self._wanted.get(row)
            if wanted is not None:
                first, end = max(start, wanted.num_scored), min(start + count, wanted.num_prompt - 1)
                if start > wanted.num_scored:
                    raise PlanError(
                        f"scheduled: row {row}: log-probabilities before position {start} were not computed"
                    )
                if first < end:
                    where = np.arange(flat + first - start, flat + end - start, dtype=np.int64)
                    yield index, first + 1, where, self._rows.tokens[row, first + 1 : end + 1], wanted.alternatives
                    wanted.num_scored = end
                if end == wanted.num_prompt - 1:
                    del self._wanted[row]
            flat += count


def token_scores(logits: torch.Tensor, token_ids: Ints, k: int) -> TokenScores:
    """Of each row of logits [R, V]: its token's log-probability and rank, and the k best ids with theirs."""
    table: NDArray[np.float32] = torch.log_softmax(logits, dim=-1).numpy()
    chosen = table[np.arange(len(table)), token_ids]
    ranks = (table > chosen[:, None]).sum(axis=-1, dtype=np.int32) + 1
    ids = np.stack([best_ids(values, k) for values in table])
    values = np.take_along_axis(table, ids, axis=-1)
    return TokenScores(*map(torch.from_numpy, (chosen, ranks, ids.astype(np.int32), values)))


def _prompt_scores(
    index: int, first: int, chosen: NDArray[Any], ranks: NDArray[Any], top_ids: NDArray[Any], top_values: NDArray[Any]
) -> PromptScores:
    if np.isnan(chosen).any():
        raise FloatingPointError(NOT_NUMBERS)
    return PromptScores(
        index,
        first,
        chosen.astype("<f4").tobytes(),
        ranks.astype("<i4").tobytes(),
        top_ids.astype("<i4").tobytes(),
        top_values.astype("<f4").tobytes(),
    )
