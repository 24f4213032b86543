"""The op set in compiled CPU kernels (`kernels.cpu`): a forward is recorded once and then run by one call a step.

Activations and sums are float32 whatever the compute dtype, to which float weights are rounded; keys and values are
kept in a dtype of their own. A quantized weight stays the integers it consists of; activations meet it as integers,
quantized in groups of 32.

A row's operations never depend on the other rows, so its bits are the same alone and in any batch.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from gpu_workers.backend import Backend, Compiled, LoadedWeight
from gpu_workers.backends.native_kv import NativeHostKV, NativeKV, zeroed_bytes
from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import Comm
from gpu_workers.noise import uniform
from gpu_workers.prepare import PreparedStep, prepare
from gpu_workers.rows import Ints, Rows
from gpu_workers.sampling import GREEDY_BELOW, NOT_NUMBERS, SamplingBatch
from gpu_workers.weights.quantized import QuantizedWeight, cat
from ipc.control import StartError
from kernels.cpu.library import (
    FLAG_GELU,
    FLAG_LOGITS_ROWS,
    GATED_COLUMNS,
    AttentionSizes,
    BufferShape,
    Code,
    Codes,
    Engine,
    Kind,
    KnownRows,
    KvType,
    Op,
    PackedWeight,
    Sampling,
    Step,
    flatten,
    kv_block_bytes,
    load,
)


@dataclass(slots=True, frozen=True)
class Value:
    """An op's result in a recording: a buffer, until the next op that writes there."""

    buffer: int
    version: int
    logits_rows: bool = False


@dataclass(slots=True, frozen=True)
class _Exchange:
    """Between two runs of operations: the ranks add up a buffer."""

    buffer: int
    width: int
    comm: Comm


@dataclass(slots=True)
class _Buffer:
    width: int
    quantizes: bool  # whether what writes there gives codes, too
    version: int = 0
    codes: Codes = Codes.NONE


class _Recording:
    """The operations of a forward. Each kind of op has a buffer for each width, which its next use overwrites."""

    def __init__(self) -> None:
        self.parts: list[list[Op] | _Exchange] = [[]]
        self.buffers: list[_Buffer] = []
        self._by_purpose: dict[tuple[str, int], int] = {}
        self.vocab_size = 0
        self._head = 0

    def output(self, purpose: str, width: int, quantizes: bool = False) -> Value:
        """A place for a result; whatever was in it is gone. `quantizes`: the op that writes there can give codes."""
        index = self._by_purpose.setdefault((purpose, width), len(self.buffers))
        if index == len(self.buffers):
            self.buffers.append(_Buffer(width, quantizes))
        self.buffers[index].version += 1
        return Value(index, self.buffers[index].version)

    def use(self, value: Value, codes: Codes = Codes.NONE) -> int:
        """The number of a buffer that is read or written; `codes`: the form that is needed besides float32."""
        buffer = self.buffers[value.buffer]
        if value.version != buffer.version:
            raise RuntimeError("the model's forward uses a result after the next op of its kind has overwritten it")
        if codes and not buffer.quantizes:
            raise RuntimeError("a quantized weight can only be multiplied with what a norm, an MLP or attention gives")
        buffer.codes |= codes
        return value.buffer

    def add(self, code: Code, **fields: Any) -> None:
        part = self.parts[-1]
        assert isinstance(part, list)
        part.append(Op(code=code, **fields))

    def begin_head(self) -> None:
        """What follows may be run again for other rows; in it the ranks exchange nothing."""
        part = self.parts[-1]
        assert isinstance(part, list)
        self._head = len(part)

    @property
    def head(self) -> list[Op]:
        """The operations of the head, which is the end of the last part."""
        part = self.parts[-1]
        assert isinstance(part, list)
        return part[self._head :]

    def exchange(self, value: Value, comm: Comm) -> None:
        self.parts += [_Exchange(self.use(value), self.buffers[value.buffer].width, comm), []]


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
        self.takes_quantized = quantized
        self.kv_dtype = kv_dtype
        self._kv_type = KvType[kv_dtype.upper()]
        self._recording: _Recording | None = None
        self._flat: _FlatBatch | None = None
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
        return _known(ids)

    # --- recording ---------------------------------------------------------------------------------------------------

    def prepare(self, rows: Rows, scheduled: bytes) -> PreparedStep | None:
        if not scheduled:
            return None
        if self._flat is None or self._flat.rows is not rows:
            self._flat = _FlatBatch(self._library, rows)
        return self._flat.fill(scheduled)

    def compile(
        self,
        body: Callable[[Any, NativeKV], Any],
        select: Callable[[Any, Any], Value],
        head: Callable[[Value], Value],
    ) -> "_Replay":
        return _Replay(lambda batch, kv: self._recorded(body, select, head, batch, kv))

    def _recorded(
        self,
        body: Callable[[Any, NativeKV], Any],
        select: Callable[[Any, Any], Value],
        head: Callable[[Value], Value],
        batch: Any,
        kv: NativeKV,
    ) -> "_Program":
        self._recording = _Recording()
        try:
            values = body(batch, kv)
            self._recording.begin_head()
            states = select(values, batch)
            head(states)
            return self._program(self._recording, states, kv)
        finally:
            self._recording = None

    def _program(self, recording: _Recording, states: Value, kv: NativeKV) -> "_Program":
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
        return _Program(self._engine, recording, recording.use(states), sizes, kv)

    @property
    def _record(self) -> _Recording:
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


class _FlatBatch:
    """The batch of a step, written into the same memory again and again by native code."""

    def __init__(self, library: ctypes.CDLL, rows: Rows) -> None:
        self._library = library
        self.rows = rows
        self._known = KnownRows(
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
            tokens = flatten(self._library, self._known, scheduled, self._capacity, self.step)
            if tokens > self._capacity:
                self._grow(tokens)
                tokens = flatten(self._library, self._known, scheduled, self._capacity, self.step)
        if tokens < 0:
            prepare(self.rows, scheduled, torch.device("cpu"))  # which says what is wrong
            raise MemoryError("the CPU kernels could not allocate the memory they need")
        return PreparedStep(self.step, self._sampling_rows(scheduled))

    def _sampling_rows(self, scheduled: bytes) -> Ints:
        columns = np.frombuffer(scheduled, dtype="<i4").reshape(-1, 4)
        rows = columns[:, 0]
        return rows if self.step.rows == len(rows) else rows[columns[:, 3] == 1]


class _Replay(Compiled):
    """A forward that is recorded when it is first run, or run with another pool, and then replayed."""

    def __init__(self, record: Callable[[Any, NativeKV], "_Program"]) -> None:
        self._record = record
        self._program: _Program | None = None

    def _program_for(self, batch: Any, kv: NativeKV) -> "_Program":
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
        return _known(self._program_for(batch, kv).best_ids(batch))

    def states(self, count: int) -> torch.Tensor:
        if self._program is None:
            raise RuntimeError("no batch has been run yet")
        return self._program.states(count)


class _Program:
    """A recording that can be run, on the pool `kv`; `states` is the number of the buffer that the head reads."""

    def __init__(self, engine: Engine, recording: _Recording, states: int, sizes: AttentionSizes, kv: NativeKV) -> None:
        self.kv = kv
        self._states, self._width = states, recording.buffers[states].width
        self._engine = engine
        self._vocab_size = recording.vocab_size
        # Kept, as fresh pages for as much memory in every step take longer than the head's products.
        self._logits = torch.empty(0, self._vocab_size)
        engine.set_attention(sizes)
        engine.set_buffers([BufferShape(each.width, each.codes) for each in recording.buffers])
        self._parts: list[ctypes.Array[Op] | _Exchange] = [
            part if isinstance(part, _Exchange) else (Op * len(part))(*part) for part in recording.parts
        ]
        self._head = (Op * len(recording.head))(*recording.head)
        self._last: Step | None = None

    def logits(self, batch: Step | ForwardBatch) -> torch.Tensor:
        """[S, vocabulary] float32, good until the next run."""
        step = _as_step(batch)
        if step.rows > self._logits.shape[0]:
            self._logits = torch.empty(step.rows, self._vocab_size)
        step.logits, step.best_ids = self._logits.data_ptr(), None
        self._run(step)
        return self._logits[: step.rows]

    def more_logits(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R, vocabulary] float32 of flat tokens of the last batch, good until the next run."""
        assert self._last is not None, "a program is made to be run"
        rows = np.ascontiguousarray(token_rows, dtype=np.int64)
        if len(rows) > self._logits.shape[0]:
            self._logits = torch.empty(len(rows), self._vocab_size)
        step = Step.from_buffer_copy(self._last)
        step.rows, step.logits_rows = len(rows), rows.ctypes.data
        step.logits, step.best_ids = self._logits.data_ptr(), None
        self._engine.run(self._head, step)
        return self._logits[: len(rows)]

    def best_ids(self, batch: Step | ForwardBatch) -> NDArray[np.int64]:
        """[S], of the largest logits; -1 where one is NaN."""
        step = _as_step(batch)
        ids = np.empty(step.rows, dtype=np.int64)
        step.logits, step.best_ids = None, ids.ctypes.data
        self._run(step)
        return ids

    def states(self, count: int) -> torch.Tensor:
        """[count, hidden], as the last run left them."""
        return self._engine.values(self._states, count, self._width)

    def _run(self, step: Step) -> None:
        self._last = step
        for part in self._parts:
            if isinstance(part, _Exchange):
                values = self._engine.values(part.buffer, step.tokens, part.width)
                values.copy_(part.comm.all_reduce(values.clone()))
            else:
                self._engine.run(part, step)


class _HeldStep(Step):
    """With the arrays that it points to."""

    arrays: tuple[object, ...] = ()


def _as_step(batch: Step | ForwardBatch) -> Step:
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


def _known(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids`; FloatingPointError where one is -1."""
    if (ids < 0).any():
        raise FloatingPointError(NOT_NUMBERS)
    return ids


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
