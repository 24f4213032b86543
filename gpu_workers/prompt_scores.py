"""Log-probabilities of prompts: of each token but the first, what the model gave it after those before.

They are those of the model's own logits: nothing that a request asks of the sampler changes them.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.rows import Ints, PlanError, Rows, int32_columns
from gpu_workers.sampling import best_ids
from ipc.engine_messages import NewRow, PromptScores

# Logits of a whole chunk would take hundreds of megabytes. The compiled kernels read the head once for so many rows.
ROWS_AT_ONCE = 48


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
        self, scheduled: bytes, logits_of: Callable[[NDArray[np.int64]], torch.Tensor], *, keep: bool
    ) -> tuple[PromptScores, ...]:
        """Of the rows of a plan that has just been carried out.

        `logits_of` gives the logits [R, vocabulary] of R flat tokens of its batch; ranks all call it in the same way,
        but only with `keep` is anything made of what it returns.
        """
        if not self._wanted:
            return ()
        return tuple(self._scores(int32_columns(scheduled, 4, "scheduled"), logits_of, keep))

    def _scores(
        self, columns: Ints, logits_of: Callable[[NDArray[np.int64]], torch.Tensor], keep: bool
    ) -> Iterator[PromptScores]:
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
                    parts = self._parts(where, self._rows.tokens[row, first + 1 : end + 1], wanted, logits_of, keep)
                    yield PromptScores(index, first + 1, *parts)
                    wanted.num_scored = end
                if end == wanted.num_prompt - 1:
                    del self._wanted[row]
            flat += count

    @staticmethod
    def _parts(
        where: NDArray[np.int64],
        token_ids: Ints,
        wanted: _Wanted,
        logits_of: Callable[[NDArray[np.int64]], torch.Tensor],
        keep: bool,
    ) -> tuple[bytes, bytes, bytes, bytes]:
        """The columns of `PromptScores`."""
        found: tuple[list[bytes], ...] = ([], [], [], [])
        for begin in range(0, len(where), ROWS_AT_ONCE):
            some = slice(begin, begin + ROWS_AT_ONCE)
            logits = logits_of(where[some])
            if keep:
                for column, part in zip(found, _score(logits, token_ids[some], wanted.alternatives), strict=True):
                    column.append(part)
        chosen, ranks, top_ids, top_values = (b"".join(column) for column in found)
        return chosen, ranks, top_ids, top_values


def _score(logits: torch.Tensor, token_ids: Ints, k: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Of each row of logits [R, V]: its token's log-probability and rank, and the k best ids with theirs."""
    table: NDArray[np.float32] = torch.log_softmax(logits, dim=-1).cpu().numpy()
    chosen = table[np.arange(len(table)), token_ids]
    if np.isnan(chosen).any():
        raise FloatingPointError("the model computed logits that are not numbers (NaN)")
    ranks = (table > chosen[:, None]).sum(axis=-1) + 1
    ids = np.stack([best_ids(values, k) for values in table])
    values = np.take_along_axis(table, ids, axis=-1)
    return (
        chosen.astype("<f4").tobytes(),
        ranks.astype("<i4").tobytes(),
        ids.astype("<i4").tobytes(),
        values.astype("<f4").tobytes(),
    )
