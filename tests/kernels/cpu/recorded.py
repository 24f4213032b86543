"""Short forwards of the native backend: rows go in as an embedding table and come out as logits of a unit matrix.

Both are exact, so that what is seen is what the ops between them did.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.backend import LoadedWeight
from gpu_workers.backends.native_cpu import NativeCpuBackend
from gpu_workers.backends.native_kv import NativeKV
from gpu_workers.backends.native_recording import Value
from gpu_workers.batch import ForwardBatch

Op = Callable[[Value, ForwardBatch, NativeKV], Value]
Prepare = Callable[[NativeCpuBackend], Op]


class Recorded:
    """Ops on rows of `inputs` [R, K]; `width` is that of their result."""

    def __init__(
        self,
        inputs: torch.Tensor,
        prepare: Prepare,
        width: int,
        threads: int = 1,
        kv_dtype: str = "float32",
        kv_shape: tuple[int, int, int, int, int] = (1, 1, 8, 1, 8),
        head: tuple[LoadedWeight, torch.Tensor | None] | None = None,
    ) -> None:
        """`head`: weight and bias in place of the unit matrix."""
        self.backend = backend = NativeCpuBackend(torch.float32, threads, quantized=True, kv_dtype=kv_dtype)
        table, _ = backend.load_vocabulary(inputs, None)
        op = prepare(backend)
        unit = backend.load_linear(*(head or (torch.eye(width), None)))
        self.kv = backend.allocate_kv(*kv_shape)
        self._forward = backend.compile(
            lambda batch, kv: op(backend.embed(table, batch), batch, kv),
            lambda x, batch: x,
            lambda x: backend.logits(x, unit),
        )

    def run(self, batch: ForwardBatch, kv: NativeKV | None = None) -> torch.Tensor:
        """On the pool `kv`, or one of its own."""
        return self._forward(batch, kv or self.kv)

    def best_ids(self, batch: ForwardBatch) -> NDArray[np.int64]:
        return self._forward.best_ids(batch, self.kv)

    def rows(self, ids: torch.Tensor, logits_rows: torch.Tensor | None = None) -> torch.Tensor:
        """The result for rows `ids` of the inputs, or for `logits_rows` of these; without attention."""
        return self.run(batch_of(ids, logits_rows))


def batch_of(ids: torch.Tensor, logits_rows: torch.Tensor | None = None) -> ForwardBatch:
    """A batch for ops that know no positions."""
    count = len(ids)
    return ForwardBatch(
        token_ids=ids,
        positions=torch.zeros(count, dtype=torch.int64),
        slots=torch.zeros(count, dtype=torch.int64),
        query_starts=[0, count],
        context_lens=[count],
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        logits_rows=torch.arange(count) if logits_rows is None else logits_rows,
    )


def evaluate(inputs: torch.Tensor, prepare: Prepare, width: int, **options: object) -> torch.Tensor:
    """The ops' result for all rows of `inputs`, [R, width]."""
    return Recorded(inputs, prepare, width, **options).rows(torch.arange(len(inputs)))


def in_turn(*parts: Prepare) -> Prepare:
    """One op on the result of another."""

    def prepare(backend: NativeCpuBackend) -> Op:
        ops = [part(backend) for part in parts]

        def op(x: Value, batch: ForwardBatch, kv: NativeKV) -> Value:
            for each in ops:
                x = each(x, batch, kv)
            return x

        return op

    return prepare


def linear(weight: LoadedWeight, bias: torch.Tensor | None = None) -> Prepare:
    def prepare(backend: NativeCpuBackend) -> Op:
        packed = backend.load_linear(weight, bias)
        return lambda x, batch, kv: backend.linear(x, packed)

    return prepare


def gated_linear(weight: LoadedWeight, bias: torch.Tensor | None, kind: str) -> Prepare:
    def prepare(backend: NativeCpuBackend) -> Op:
        packed = backend.load_gated_linear(weight, bias)
        return lambda x, batch, kv: backend.gated_linear(x, packed, kind)

    return prepare


def rms_norm(weight: torch.Tensor, eps: float) -> Prepare:
    def prepare(backend: NativeCpuBackend) -> Op:
        loaded = backend.load_norm(weight)
        return lambda x, batch, kv: backend.rms_norm(x, loaded, eps)

    return prepare
