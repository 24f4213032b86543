"""Embeddings: the hidden states of a prompt's tokens, pooled into one vector and divided by its length."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.rows import PlanError, int32_columns
from ipc.engine_messages import NewRow
from ipc.messages import Pooling


class _Wanted:
    """Which positions of a prompt make up its embedding, and the sum of those computed so far."""

    __slots__ = ("due", "end", "total")

    def __init__(self, pooling: Pooling, num_prompt: int) -> None:
        self.due = num_prompt - 1 if pooling == "last" else 0  # the next position
        self.end = 1 if pooling == "cls" else num_prompt
        self.total: NDArray[np.float64] | None = None  # [hidden]

    def add(self, states: NDArray[np.float32]) -> None:
        """Add those [R, hidden] of the next R positions."""
        # One after the other, so that chunks of any size give the same bits.
        for state in states:
            self.total = state.astype(np.float64) if self.total is None else self.total + state
        self.due += len(states)


class Pooler:
    """Knows which rows want embeddings, and takes what each step has computed for them."""

    def __init__(self) -> None:
        self._wanted: dict[int, _Wanted] = {}

    def add(self, new: NewRow) -> None:
        """Take note of what a new row wants."""
        self._wanted.pop(new.row, None)
        if new.pooling:
            self._wanted[new.row] = _Wanted(new.pooling, new.num_prompt)

    def free(self, rows: list[int]) -> None:
        for row in rows:
            self._wanted.pop(row, None)

    def embeddings(self, scheduled: bytes, states_of: Callable[[NDArray[np.int64]], torch.Tensor]) -> tuple[bytes, ...]:
        """Of a plan that has just been carried out, as in `StepResult.embeddings`.

        `states_of` gives the hidden states [R, hidden], float32, of R flat tokens of its batch. `PlanError` where it
        skips positions that are needed, FloatingPointError where the model computed NaN.
        """
        if not self._wanted:
            return ()
        flat = 0
        ranges: list[tuple[_Wanted, NDArray[np.int64]]] = []
        sampling: list[int] = []
        for row, start, count, sample in int32_columns(scheduled, 4, "scheduled").tolist():
            wanted = self._wanted.get(row)
            if wanted is not None:
                if start > wanted.due and wanted.due < wanted.end:
                    raise PlanError(f"scheduled: row {row}: hidden states before position {start} were not computed")
                end = min(start + count, wanted.end)
                if wanted.due < end:
                    ranges.append((wanted, np.arange(flat + wanted.due - start, flat + end - start, dtype=np.int64)))
            if sample:
                sampling.append(row)
            flat += count
        if ranges:
            states = states_of(np.concatenate([flat_tokens for _, flat_tokens in ranges])).cpu().numpy()
            taken = 0
            for wanted, flat_tokens in ranges:
                wanted.add(states[taken : taken + len(flat_tokens)])
                taken += len(flat_tokens)
        found = tuple(self._finished(row) for row in sampling)
        return found if any(found) else ()

    def _finished(self, row: int) -> bytes:
        """The embedding of a sampling row: of those that are not pooled, or were before, none."""
        wanted = self._wanted.pop(row, None)
        if wanted is None or wanted.total is None:
            return b""
        length = np.sqrt(np.square(wanted.total).sum())
        if not np.isfinite(length):
            raise FloatingPointError("the model computed hidden states that are not finite numbers")
        unit: NDArray[np.float32] = (wanted.total / max(length, np.finfo(np.float32).tiny)).astype("<f4")
        return unit.tobytes()
