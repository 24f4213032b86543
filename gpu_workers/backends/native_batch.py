"""A step's batch in the form that native code reads: pointers to arrays that live as long as it does."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.batch import ForwardBatch
from gpu_workers.prepare import PreparedStep, prepare
from gpu_workers.rows import Ints, Rows
from kernels.cpu.library import KnownRows, Step, flatten


class FlatBatch:
    """The batch of a step, written into the same memory again and again by native code."""

    def __init__(self, library: ctypes.CDLL, rows: Rows) -> None:
        self._library = library
        self.rows = rows
        self.known_ids = KnownRows(
            max_seqs=rows.max_seqs,
            max_model_len=rows.max_model_len,
            max_blocks=rows.max_blocks,
            block_size=rows.block_size,
            tokens=rows.tokens.ctypes.data,
            num_tokens=rows.num_tokens.ctypes.data,
            block_tables=rows.block_tables.ctypes.data,
            num_blocks=rows.num_blocks.ctypes.data,
            in_use=rows.in_use.ctypes.data,
        )
        self.step = Step()
        self._sequences = {
            name: np.zeros(rows.max_seqs + 1, dtype=np.int64)
            for name in ("query_starts", "context_lens", "table_rows", "logits_rows")
        }
        self._tokens: dict[str, NDArray[np.int64]] = {}
        for name, array in self._sequences.items():
            setattr(self.step, name, array.ctypes.data)
        self._grow(rows.max_seqs)

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        for name in ("token_ids", "positions", "slots"):
            self._tokens[name] = np.zeros(capacity, dtype=np.int64)
            setattr(self.step, name, self._tokens[name].ctypes.data)

    def fill(self, scheduled: bytes) -> PreparedStep:
        """Raises `PlanError`."""
        tokens = -1
        if len(scheduled) % 16 == 0:
            tokens = flatten(self._library, self.known_ids, scheduled, self._capacity, self.step)
            if tokens > self._capacity:
                self._grow(tokens)
                tokens = flatten(self._library, self.known_ids, scheduled, self._capacity, self.step)
        if tokens < 0:
            prepare(self.rows, scheduled, torch.device("cpu"))  # which says what is wrong
            raise MemoryError("the CPU kernels could not allocate the memory they need")
        return PreparedStep(self.step, self._sampling_rows(scheduled))

    def _sampling_rows(self, scheduled: bytes) -> Ints:
        columns = np.frombuffer(scheduled, dtype="<i4").reshape(-1, 4)
        rows = columns[:, 0]
        return rows if self.step.rows == len(rows) else rows[columns[:, 3] == 1]


class _HeldStep(Step):
    """With the arrays that it points to."""

    arrays: tuple[object, ...] = ()


def as_step(batch: Step | ForwardBatch) -> Step:
    if isinstance(batch, Step):
        return batch
    tables = batch.block_tables.contiguous()
    arrays = {
        name: np.ascontiguousarray(values, dtype=np.int64)
        for name, values in (
            ("token_ids", batch.token_ids),
            ("positions", batch.positions),
            ("slots", batch.slots),
            ("query_starts", batch.query_starts),
            ("context_lens", batch.context_lens),
            ("table_rows", range(len(batch.context_lens))),
            ("logits_rows", batch.logits_rows),
        )
    }
    step = _HeldStep(
        tokens=len(batch.token_ids),
        sequences=len(batch.context_lens),
        rows=len(batch.logits_rows),
        table_width=tables.shape[1],
        block_tables=tables.data_ptr(),
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    step.arrays = tables, arrays
    return step
