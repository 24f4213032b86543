"""One decoder layer of random shapes, from token ids to logits: in the native engine, and in the oracle in float64."""

import ctypes
import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st

from kernels import reference
from kernels.cpu.library import (
    CODES_OF,
    FLAG_GELU,
    FLAG_LOGITS_ROWS,
    GATED_COLUMNS,
    GROUP,
    AttentionSizes,
    BufferShape,
    Code,
    Codes,
    Engine,
    Kind,
    KvType,
    Op,
    PackedWeight,
    Step,
    kv_block_bytes,
)

EPS = 1e-5
ALIGNMENT = 64
KV_DTYPES = {KvType.FLOAT32: torch.float32, KvType.BFLOAT16: torch.bfloat16, KvType.FLOAT16: torch.float16}


def kept(x: torch.Tensor, kv_type: KvType) -> torch.Tensor:
    """Keys or values [..., D] float32 as the pool keeps them: int8 with a scale for each, else rounded."""
    if kv_type != KvType.INT8:
        return x.to(KV_DTYPES[kv_type])
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # one division, where a number over a tensor is two operations
    codes = torch.round(x * torch.where(largest > 0, inverse, 0))
    return codes.double() * (largest / 127).double()


@dataclass(frozen=True)
class Shapes:
    """What a layer is like; `contexts` are the lengths of its sequences."""

    kind: Kind
    contexts: tuple[int, ...]
    kv_heads: int
    group: int
    head_dim: int
    hidden: int
    ffn: int
    vocabulary: int
    block_size: int
    kv_type: KvType
    activation: str
    threads: int
    seed: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def quantized(self) -> bool:
        return self.kind in (Kind.INT4, Kind.INT8)


@st.composite
def shapes(draw: st.DrawFn) -> Shapes:
    """Any layer that the engine takes: quantized products need whole groups of 32 inputs."""
    kind = draw(st.sampled_from(Kind))
    quantized = kind in (Kind.INT4, Kind.INT8)
    return Shapes(
        kind=kind,
        # 64 and 512 are where attention starts another tile and another split of the context
        contexts=tuple(
            draw(st.lists(st.integers(1, 70) | st.sampled_from([127, 512, 513, 1030]), min_size=1, max_size=4))
        ),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([32, 64, 96]) if quantized else st.integers(1, 40).map(lambda half: 2 * half)),
        # A norm of very few elements magnifies the rounding of a residual that happens to be almost zero.
        hidden=draw(st.integers(1, 5).map(lambda groups: GROUP * groups) if quantized else st.integers(6, 100)),
        ffn=GATED_COLUMNS * draw(st.integers(1, 4)),
        vocabulary=draw(st.integers(1, 300)),
        block_size=draw(st.sampled_from([1, 4, 5, 8, 16, 32, 64, 100])),
        kv_type=draw(st.sampled_from(KvType)),
        activation=draw(st.sampled_from(["silu", "gelu"])),
        threads=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1 << 30)),
    )


class Layer:
    """Weights, KV pool and ids; `run` is the native engine's step, `expected` the oracle's logits."""

    def __init__(self, library: ctypes.CDLL, shapes: Shapes) -> None:
        self.shapes = shapes
        self._library = library
        self._random = torch.Generator().manual_seed(shapes.seed)
        heads, dim, hidden = shapes.heads, shapes.head_dim, shapes.hidden
        qkv_width = (heads + 2 * shapes.kv_heads) * dim
        float_kind = shapes.kind if not shapes.quantized else Kind.BFLOAT16
        self.ids = [torch.randint(shapes.vocabulary, (n,), generator=self._random) for n in shapes.contexts]
        self._embedding, self._embedding_values = self._weight(float_kind, shapes.vocabulary, hidden)
        self._qkv, self._qkv_values = self._weight(shapes.kind, qkv_width, hidden)
        self._output, self._output_values = self._weight(shapes.kind, hidden, heads * dim)
        self._gate_up, self._gate_up_values = self._weight(shapes.kind, 2 * shapes.ffn, hidden)
        self._down, self._down_values = self._weight(shapes.kind, hidden, shapes.ffn)
        self._head, self._head_values = self._weight(shapes.kind, shapes.vocabulary, hidden)
        self._norm = self._uniform(hidden) + 0.5
        self._bias = self._uniform(qkv_width) - 0.5
        self._qkv.set_bias(self._bias)
        frequencies, scale = reference.rope_frequencies(dim, 1e4)
        self._cos, self._sin = reference.rope_tables(frequencies, scale, max(shapes.contexts))
        self._place_blocks()
        self._engine = self._new_engine()
        self._ops = self._record()

    def _uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._random)

    def _weight(self, kind: Kind, n: int, k: int) -> tuple[PackedWeight, torch.Tensor]:
        """A packed weight and what it stands for, [N, K] in float64."""
        if kind in (Kind.FLOAT32, Kind.BFLOAT16):
            values = torch.randn(n, k, generator=self._random) / k**0.5
            packed = PackedWeight.from_float(self._library, values, kind)
            return packed, (values if kind == Kind.FLOAT32 else values.bfloat16()).double()
        scales = (self._uniform(n, k // GROUP) * 0.02).half()
        spread = scales.double().repeat_interleave(GROUP, dim=1)
        if kind == Kind.INT8:
            codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=self._random)
            return PackedWeight.from_int8(self._library, codes, scales), codes * spread
        codes = torch.randint(16, (n, k), dtype=torch.uint8, generator=self._random)
        minimums = (-0.2 * self._uniform(n, k // GROUP)).half()
        packed = PackedWeight.from_int4(self._library, codes, scales, minimums)
        return packed, codes * spread + minimums.double().repeat_interleave(GROUP, dim=1)

    def _place_blocks(self) -> None:
        """Each sequence's blocks, scattered over the pool; what is in none of them is never read."""
        size = self.shapes.block_size
        counts = [-(-context // size) for context in self.shapes.contexts]
        self._num_blocks = sum(counts) + 2
        free = list(range(self._num_blocks))
        random.Random(self.shapes.seed).shuffle(free)
        self._tables = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for row, count in zip(self._tables, counts, strict=True):
            row[:count] = torch.tensor([free.pop() for _ in range(count)])

    def _new_engine(self) -> Engine:
        shapes = self.shapes
        sizes = AttentionSizes(shapes.heads, shapes.kv_heads, shapes.head_dim, shapes.block_size, 1)
        sizes.kv_type = shapes.kv_type
        sizes.cos, sizes.sin = self._cos.data_ptr(), self._sin.data_ptr()
        num_bytes = self._num_blocks * kv_block_bytes(self._library, sizes)
        # All bits set is NaN: reading a place that was never written shows.
        self._pool = torch.full((num_bytes + ALIGNMENT,), 255, dtype=torch.uint8)
        sizes.kv = -(-self._pool.data_ptr() // ALIGNMENT) * ALIGNMENT
        engine = Engine(self._library, shapes.threads)
        engine.set_attention(sizes)
        codes = CODES_OF.get(shapes.kind, Codes.NONE)
        width = shapes.heads * shapes.head_dim
        engine.set_buffers(
            [
                BufferShape(shapes.hidden),  # residual
                BufferShape(shapes.hidden, codes),  # normed
                BufferShape(width + 2 * shapes.kv_heads * shapes.head_dim),  # q, k, v
                BufferShape(width),  # rotated q
                BufferShape(width, codes),  # attention
                BufferShape(shapes.hidden),  # what is added to the residual
                BufferShape(shapes.ffn, codes),  # gated
            ]
        )
        return engine

    def _record(self) -> "ctypes.Array[Op]":
        norm = self._norm.data_ptr()
        gelu = FLAG_GELU if self.shapes.activation == "gelu" else 0

        def op(code: Code, source: int, into: int, weight: int | None = None, flags: int = 0, residual: int = -1) -> Op:
            return Op(code, flags, source, residual, into, 0, EPS, 0, weight)

        ops = [
            op(Code.EMBED, -1, 0, self._embedding.pointer),
            op(Code.NORM, -1, 1, norm, residual=0),
            op(Code.LINEAR, 1, 2, self._qkv.pointer),
            op(Code.ROPE, 2, 3),
            op(Code.ATTENTION, 3, 4),
            op(Code.LINEAR, 4, 5, self._output.pointer),
            op(Code.NORM, 5, 1, norm, residual=0),
            op(Code.GATED, 1, 6, self._gate_up.pointer, flags=gelu),
            op(Code.LINEAR, 6, 5, self._down.pointer),
            op(Code.NORM, 5, 1, norm, flags=FLAG_LOGITS_ROWS, residual=0),
            op(Code.LOGITS, 1, -1, self._head.pointer),
        ]
        return (Op * len(ops))(*ops)

    def run(self, *parts: tuple[int, int, int]) -> torch.Tensor:
        """Compute positions begin..end of parts (sequence, begin, end) -> logits [parts, vocabulary] at their ends."""
        lengths = [end - begin for _, begin, end in parts]
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in parts])
        owners = torch.tensor([sequence for sequence, _, _ in parts]).repeat_interleave(torch.tensor(lengths))
        blocks = self._tables[owners, positions // self.shapes.block_size].long()
        slots = blocks * self.shapes.block_size + positions % self.shapes.block_size
        ids = torch.cat([self.ids[sequence][begin:end] for sequence, begin, end in parts])
        starts = torch.tensor([0, *accumulate(lengths)])
        contexts = torch.tensor([end for _, _, end in parts])
        table_rows = torch.tensor([sequence for sequence, _, _ in parts])
        last_rows = starts[1:] - 1
        logits = torch.empty(len(parts), self.shapes.vocabulary)
        arrays = (ids, positions, slots, starts, contexts, self._tables, table_rows, last_rows, logits)
        sizes = (len(ids), len(parts), len(parts), self._tables.shape[1])
        self._engine.run(self._ops, Step(*sizes, *(array.data_ptr() for array in arrays)))
        return logits

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Activations as a product sees them: float32, or codes, symmetric in groups of 32.

        Beside int8 weights they are int16; beside int4 weights int8, but for the four largest of a row.
        """
        if not self.shapes.quantized:
            return x
        kept = torch.zeros_like(x)
        if self.shapes.kind == Kind.INT4:
            largest = x.abs().topk(4).indices
            kept.scatter_(-1, largest, x.gather(-1, largest))
        groups = (x - kept).unflatten(-1, (-1, GROUP))
        scales = groups.abs().amax(-1, keepdim=True) / (127 if self.shapes.kind == Kind.INT4 else 32767)
        return (torch.round(groups / scales.clamp_min(1e-300)) * scales).flatten(-2) + kept

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return reference.linear(self._rounded(x), weight, bias)

    def expected(self, sequence: int) -> torch.Tensor:
        """The oracle's logits [vocabulary] at the end of a sequence, in float64."""
        shapes, context = self.shapes, self.shapes.contexts[sequence]
        norm, cos, sin = self._norm.double(), self._cos[:context].double(), self._sin[:context].double()
        residual = self._embedding_values[self.ids[sequence]]
        qkv = self._linear(reference.rms_norm(residual, norm, EPS), self._qkv_values, self._bias.double())
        heads = qkv.unflatten(-1, (-1, shapes.head_dim))
        q, k, v = heads.split([shapes.heads, shapes.kv_heads, shapes.kv_heads], dim=1)
        q, k = reference.apply_rope(q, cos, sin), reference.apply_rope(k, cos, sin)
        k, v = (kept(part, shapes.kv_type).double() for part in (k, v))
        table = torch.zeros(1, 1, dtype=torch.int32)
        attention = reference.paged_attention(q, k, v, table, context, [0, context], [context]).flatten(1)
        added = self._linear(attention, self._output_values)
        normed, residual = reference.add_rms_norm(added, residual, norm, EPS)
        # 32 gate rows, then as many up rows, and so on
        gate_up = self._linear(normed, self._gate_up_values).unflatten(-1, (-1, 2, GATED_COLUMNS))
        gated = reference.gated_activation(gate_up.transpose(-3, -2).flatten(-3), shapes.activation)
        normed, _ = reference.add_rms_norm(self._linear(gated, self._down_values), residual, norm, EPS)
        return self._linear(normed[-1], self._head_values)
