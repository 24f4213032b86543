"""A recorded forward as something that runs: one call of native code for all operations between two exchanges."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.backend import Compiled
from gpu_workers.backends.native_batch import as_step
from gpu_workers.backends.native_kv import NativeKV
from gpu_workers.backends.native_recording import Exchange, Recording
from gpu_workers.batch import ForwardBatch
from gpu_workers.sampling import NOT_NUMBERS
from kernels.cpu.library import AttentionSizes, BufferShape, Code, Engine, Op, Step


class Replay(Compiled):
    """A forward that is recorded when it is first run, or run with another pool, and then replayed."""

    def __init__(self, record: Callable[[Any, NativeKV], "Program"]) -> None:
        self._record = record
        self._program: Program | None = None

    def _program_for(self, batch: Any, kv: NativeKV) -> "Program":
        if self._program is None or self._program.kv is not kv:
            self._program = self._record(batch, kv)
        return self._program

    def __call__(self, batch: Step | ForwardBatch, kv: NativeKV) -> torch.Tensor:
        return self._program_for(batch, kv).logits(batch)

    def more_logits(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        if self._program is None:
            raise RuntimeError("no batch has been run yet")
        return self._program.more_logits(token_rows)

    def best_ids(self, batch: Step | ForwardBatch, kv: NativeKV) -> NDArray[np.int64]:
        return known_ids(self._program_for(batch, kv).best_ids(batch))

    def hidden_states(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        if self._program is None:
            raise RuntimeError("no batch has been run yet")
        return self._program.hidden_states(token_rows)


class Program:
    """A recording that can be run, on the pool `kv`; `states` is the number of the buffer that the head reads."""

    def __init__(self, engine: Engine, recording: Recording, states: int, sizes: AttentionSizes, kv: NativeKV) -> None:
        self.kv = kv
        self._states, self._width = states, recording.buffers[states].width
        self._engine = engine
        self._vocab_size = recording.vocab_size
        # Kept, as fresh pages for as much memory in every step take longer than the head's products.
        self._logits = torch.empty(0, self._vocab_size)
        engine.set_attention(sizes)
        engine.set_buffers([BufferShape(each.width, each.codes) for each in recording.buffers])
        self._parts: list[ctypes.Array[Op] | Exchange] = [
            part if isinstance(part, Exchange) else (Op * len(part))(*part) for part in recording.parts
        ]
        self._head = (Op * len(recording.head))(*recording.head)
        before_logits = [op for op in recording.head if op.code != Code.LOGITS]
        self._norm = (Op * len(before_logits))(*before_logits)
        self._last: Step | None = None

    def logits(self, batch: Step | ForwardBatch) -> torch.Tensor:
        """[S, vocabulary] float32, good until the next run."""
        step = as_step(batch)
        if step.rows > self._logits.shape[0]:
            self._logits = torch.empty(step.rows, self._vocab_size)
        step.logits, step.best_ids = self._logits.data_ptr(), None
        self._run(step)
        return self._logits[: step.rows]

    def more_logits(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, vocabulary] float32 of flat tokens of the last batch, good until the next run."""
        if len(token_rows) > self._logits.shape[0]:
            self._logits = torch.empty(len(token_rows), self._vocab_size)
        self._run_again(self._head, token_rows)
        return self._logits[: len(token_rows)]

    def hidden_states(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, hidden] float32 of flat tokens of the last batch, good until the next run."""
        self._run_again(self._norm, token_rows)
        return self._engine.values(self._states, len(token_rows), self._width)

    def _run_again(self, ops: ctypes.Array[Op], token_rows: NDArray[np.int64]) -> None:
        """Operations of the head, on other rows of the last batch."""
        assert self._last is not None, "a program is made to be run"
        rows = np.ascontiguousarray(token_rows, dtype=np.int64)
        step = Step.from_buffer_copy(self._last)
        step.rows, step.logits_rows = len(rows), rows.ctypes.data
        step.logits, step.best_ids = self._logits.data_ptr(), None
        self._engine.run(ops, step)

    def best_ids(self, batch: Step | ForwardBatch) -> NDArray[np.int64]:
        """[S], of the largest logits; -1 where one is NaN."""
        step = as_step(batch)
        ids = np.empty(step.rows, dtype=np.int64)
        step.logits, step.best_ids = None, ids.ctypes.data
        self._run(step)
        return ids

    def _run(self, step: Step) -> None:
        self._last = step
        for part in self._parts:
            if isinstance(part, Exchange):
                values = self._engine.values(part.buffer, step.tokens, part.width)
                values.copy_(part.comm.all_reduce(values.clone()))
            else:
                self._engine.run(part, step)


def known_ids(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids`; FloatingPointError where one is -1."""
    if (ids < 0).any():
        raise FloatingPointError(NOT_NUMBERS)
    return ids
