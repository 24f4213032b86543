"""The op set in compiled CPU kernels (`kernels.cpu`): a forward is recorded once and then run by one call a step.

Activations and sums are float32 whatever the compute dtype, to which float weights are rounded; keys and values are
kept in a dtype of their own. A quantized weight stays the integers it consists of; activations meet it as integers,
quantized in groups of 32.

A row's operations never depend on the other rows, so its bits are the same alone and in any batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from gpu_workers.backend import Backend, LoadedWeight
from gpu_workers.backends.native_batch import FlatBatch
from gpu_workers.backends.native_kv import NativeHostKV, NativeKV, zeroed_bytes
from gpu_workers.backends.native_program import Program, Replay, known_ids
from gpu_workers.backends.native_recording import Recording, Value
from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import Comm
from gpu_workers.noise import uniform
from gpu_workers.prepare import PreparedStep
from gpu_workers.rows import Rows
from gpu_workers.sampling import GREEDY_BELOW, SamplingBatch
from gpu_workers.weights.quantized import QuantizedWeight, cat
from ipc.control import StartError
from kernels.cpu.library import (
    FLAG_GELU,
    FLAG_LOGITS_ROWS,
    GATED_COLUMNS,
    AttentionSizes,
    Code,
    Engine,
    Kind,
    KvType,
    PackedWeight,
    Sampling,
    kv_block_bytes,
    load,
)


class NativeCpuBackend(Backend):
    """See `gpu_workers.backends.make_backend`; `progress` is told when the kernels are being compiled.

    Raises `kernels.cpu.build.BuildError` when they can't be, StartError when threads can't be bound to `cpus`.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        threads: int,
        quantized: bool,
        kv_dtype: str = "float32",
        progress: Callable[[str], None] | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        # torch is left with small things: a second team of threads would only be in the way of the kernels' own.
        torch.set_num_threads(1)
        self._library = load(progress)
        self._engine = Engine(self._library, threads)
        if cpus:
            try:
                self._engine.pin(cpus)
            except OSError as error:
                raise StartError(f"--pin-threads: {error}") from error
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.takes_quantized = self.keeps_quantized_table = quantized
        self.kv_dtype = kv_dtype
        self._kv_type = KvType[kv_dtype.upper()]
        self._recording: Recording | None = None
        self._flat: FlatBatch | None = None
        self._cos = self._sin = torch.empty(0)
        self._num_heads = 0

    # --- loading -----------------------------------------------------------------------------------------------------

    def load_linear(self, weight: LoadedWeight, bias: torch.Tensor | None, partial: bool = False) -> PackedWeight:
        return self._pack(weight, bias)

    def load_gated_linear(self, weight: LoadedWeight, bias: torch.Tensor | None) -> PackedWeight:
        width = weight.shape[0] // 2
        padding = -width % GATED_COLUMNS
        gate, up = (_pad_rows(weight.narrow(0, start, width), padding) for start in (0, width))
        blocks = torch.arange(width + padding).view(-1, GATED_COLUMNS)
        order = torch.stack((blocks, blocks + width + padding), dim=1).flatten()
        if bias is not None:
            bias = torch.cat([F.pad(half, (0, padding)) for half in bias.chunk(2)])[order]
        packed = self._pack(_take_rows((gate, up), order), bias)
        packed.gated_width = width
        return packed

    def load_vocabulary(self, table: LoadedWeight, head: LoadedWeight | None) -> tuple[PackedWeight, PackedWeight]:
        packed = self._pack(table, None)
        return packed, packed if head is None else self._pack(head, None)

    def load_norm(self, weight: torch.Tensor) -> torch.Tensor:
        # A copy: a view would keep the whole file mapped.
        return weight.to(self.dtype).to(torch.float32, copy=True).contiguous()

    def _pack(self, weight: LoadedWeight, bias: torch.Tensor | None) -> PackedWeight:
        if isinstance(weight, QuantizedWeight):
            if weight.bits == 4:
                packed = PackedWeight.from_int4(self._library, weight.codes, weight.scales, weight.minimums)
            else:
                packed = PackedWeight.from_int8(self._library, weight.codes, weight.scales)
        else:
            exact = weight.dtype == torch.bfloat16 or self.dtype == torch.bfloat16
            packed = PackedWeight.from_float(self._library, weight, Kind.BFLOAT16 if exact else Kind.FLOAT32)
        if bias is not None:
            packed.set_bias(bias.to(self.dtype))
        return packed

    def load_rope(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._cos, self._sin = cos.float().contiguous(), sin.float().contiguous()

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> NativeKV:
        sizes = AttentionSizes(
            num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, kv_type=self._kv_type
        )
        pool = zeroed_bytes(num_blocks, num_layers, kv_block_bytes(self._library, sizes))
        return NativeKV(pool, block_size, num_kv_heads, head_dim)

    def allocate_host_kv(self, kv: NativeKV, num_blocks: int) -> NativeHostKV:
        _, layers, block_bytes = kv.pool.shape
        return NativeHostKV(zeroed_bytes(num_blocks, layers, block_bytes))

    def copy_blocks_out(self, kv: NativeKV, host_kv: NativeHostKV, pairs: torch.Tensor) -> None:
        host_kv.copy_out(kv, pairs)

    def copy_blocks_in(self, kv: NativeKV, host_kv: NativeHostKV, pairs: torch.Tensor) -> None:
        host_kv.copy_in(kv, pairs)

    def choose_tokens(self, logits: torch.Tensor, batch: SamplingBatch) -> NDArray[np.int64]:
        logits = logits.contiguous()  # several ranks' are a part of wider rows
        ids = np.empty(len(logits), dtype=np.int64)
        settings = {
            "temperature": np.where(batch.temperature < GREEDY_BELOW, np.float32(0), batch.temperature),
            "top_k": batch.top_k,
            "top_p": batch.top_p,
            "min_p": batch.min_p,
            "uniforms": uniform(batch.seeds, batch.output_index),
            "ids": ids,
        }
        pointers = {name: values.ctypes.data for name, values in settings.items()}
        self._engine.sample(Sampling(*logits.shape, logits=logits.data_ptr(), **pointers))
        return known_ids(ids)

    # --- recording ---------------------------------------------------------------------------------------------------

    def prepare(self, rows: Rows, scheduled: bytes) -> PreparedStep | None:
        if not scheduled:
            return None
        if self._flat is None or self._flat.rows is not rows:
            self._flat = FlatBatch(self._library, rows)
        return self._flat.fill(scheduled)

    def compile(
        self,
        body: Callable[[Any, NativeKV], Any],
        select: Callable[[Any, Any], Value],
        head: Callable[[Value], Value],
    ) -> "Replay":
        return Replay(lambda batch, kv: self._recorded(body, select, head, batch, kv))

    def _recorded(
        self,
        body: Callable[[Any, NativeKV], Any],
        select: Callable[[Any, Any], Value],
        head: Callable[[Value], Value],
        batch: Any,
        kv: NativeKV,
    ) -> "Program":
        self._recording = Recording()
        try:
            values = body(batch, kv)
            self._recording.begin_head()
            states = select(values, batch)
            head(states)
            return self._program(self._recording, states, kv)
        finally:
            self._recording = None

    def _program(self, recording: Recording, states: Value, kv: NativeKV) -> "Program":
        sizes = AttentionSizes(
            num_heads=self._num_heads,
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            block_size=kv.block_size,
            num_layers=kv.num_layers,
            kv_type=self._kv_type,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            kv=kv.pool.ctypes.data,
        )
        return Program(self._engine, recording, recording.use(states), sizes, kv)

    @property
    def _record(self) -> Recording:
        if self._recording is None:
            raise RuntimeError("ops of this backend are recorded inside `compile` only")
        return self._recording

    def embed(self, table: PackedWeight, batch: ForwardBatch, first: int = 0) -> Value:
        out = self._record.output("residual", table.k)
        self._record.add(Code.EMBED, output=self._record.use(out), weight=table.pointer, first=first)
        return out

    def rms_norm(self, x: Value, weight: torch.Tensor, eps: float) -> Value:
        return self._norm(None, x, weight, eps)

    def add_rms_norm(self, x: Value, residual: Value, weight: torch.Tensor, eps: float) -> tuple[Value, Value]:
        # The sum is written over the residual.
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, added: Value | None, residual: Value, weight: torch.Tensor, eps: float) -> Value:
        record = self._record
        selected = residual.logits_rows
        out = record.output("norm of selected rows" if selected else "norm", weight.shape[0], quantizes=True)
        record.add(
            Code.NORM,
            flags=FLAG_LOGITS_ROWS if selected else 0,
            input=-1 if added is None else record.use(added),
            residual=record.use(residual),
            output=record.use(out),
            weight=weight.data_ptr(),
            eps=eps,
        )
        return Value(out.buffer, out.version, selected)

    def select_logits_rows(self, x: Value, batch: ForwardBatch) -> Value:
        return Value(x.buffer, x.version, logits_rows=True)

    def linear(self, x: Value, weight: PackedWeight) -> Value:
        source = self._record.use(x, weight.codes)
        out = self._record.output("linear", weight.n)
        self._record.add(Code.LINEAR, input=source, output=self._record.use(out), weight=weight.pointer)
        return out

    def gated_linear(self, x: Value, weight: PackedWeight, kind: str) -> Value:
        source = self._record.use(x, weight.codes)
        out = self._record.output("gated linear", weight.gated_width, quantizes=True)
        flags = FLAG_GELU if kind == "gelu" else 0
        self._record.add(Code.GATED, flags=flags, input=source, output=out.buffer, weight=weight.pointer)
        return out

    def logits(self, x: Value, head: PackedWeight) -> Value:
        self._record.add(Code.LOGITS, input=self._record.use(x, head.codes), weight=head.pointer)
        self._record.vocab_size = head.n
        return x

    def rope_and_write(self, qkv: Value, num_heads: int, kv: NativeKV, layer: int, batch: ForwardBatch) -> Value:
        self._num_heads = num_heads
        record = self._record
        out = record.output("query", num_heads * kv.head_dim)
        record.add(Code.ROPE, input=record.use(qkv), output=record.use(out), layer=layer)
        return out

    def attention(self, q: Value, kv: NativeKV, layer: int, batch: ForwardBatch, window: int = 0) -> Value:
        record = self._record
        out = record.output("attention", record.buffers[q.buffer].width, quantizes=True)
        record.add(Code.ATTENTION, input=record.use(q), output=record.use(out), layer=layer, window=window)
        return out

    def all_reduce(self, x: Value, comm: Comm) -> Value:
        self._record.exchange(x, comm)
        return x


def _pad_rows(weight: LoadedWeight, count: int) -> LoadedWeight:
    if not count:
        return weight
    return weight.pad_rows(count) if isinstance(weight, QuantizedWeight) else F.pad(weight, (0, 0, 0, count))


def _take_rows(halves: tuple[LoadedWeight, LoadedWeight], order: torch.Tensor) -> LoadedWeight:
    """Rows of both halves one after the other, in another order."""
    first, second = halves
    if isinstance(first, QuantizedWeight) and isinstance(second, QuantizedWeight):
        return cat((first, second)).rows(order)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    return torch.cat((first, second))[order]
