"""The operations that are measured: with the shapes of SmolLM2-135M, and what each reads and computes."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.library import (
    CODES_OF,
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
from tools.bench_kernels.limits import Work
from tools.bench_kernels.weights import Weights

ROWS = (1, 8, 32, 128, 512)
LINEAR_ROWS = (1, 4, 8, 32, 128, 512)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY = 576, 9, 3, 64, 1536, 49152
BLOCK_SIZE = 16
DECODE = tuple((sequences, context) for context in (128, 1024, 4096) for sequences in (1, 8, 32))
PREFILL_TOKENS, PREFILL_STARTS = 512, (0, 1536)
WINDOW, WINDOW_CONTEXT = 1024, 4096
_EPS = 1e-5
_REPEATED = 64  # an operation without a weight, in one recording
_MOST_KV_BYTES = 1 << 30


@dataclass(slots=True)
class Recorded:
    """Operations that can be run in any order, each with the same work. `kept`: the memory they point to."""

    engine: Engine
    ops: list[Op]
    step: Step
    work: Work
    kept: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the cases are run. The data of those that read much is `working_set` bytes, as long as memory is spared."""

    library: ctypes.CDLL
    threads: int
    weights: Weights
    working_set: int


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    record: Callable[[Place], Recorded]


@dataclass(frozen=True, slots=True)
class Linear:
    """The product of `rows` rows with an [N, K] weight, as the operation `code`.

    `greedy`: of LOGITS, not the logits but the ids of the largest.
    """

    code: Code
    kind: Kind
    n: int
    k: int
    rows: int
    greedy: bool = False

    @property
    def name(self) -> str:
        label = {Code.GATED: "gated", Code.LOGITS: "greedy" if self.greedy else "logits"}.get(self.code, "linear")
        return f"{label}/{self.kind.name.lower()}/{self.n}x{self.k}/{self.rows}"

    def record(self, place: Place) -> Recorded:
        copies = place.weights.copies(self.kind, self.n, self.k)
        codes = CODES_OF.get(self.kind, Codes.NONE)
        width = self.n // 2 if self.code == Code.GATED else self.n
        logits = torch.empty(self.rows if self.code == Code.LOGITS and not self.greedy else 0, self.n)
        best_ids = torch.empty(self.rows, dtype=torch.int64)
        shapes = [BufferShape(self.k), BufferShape(self.k, codes)]
        if self.code != Code.LOGITS:
            shapes.append(BufferShape(width, codes if self.code == Code.GATED else Codes.NONE))
        engine = Engine(place.library, place.threads)
        engine.set_buffers(shapes)
        step = Step(tokens=self.rows, rows=self.rows, logits=logits.data_ptr())
        if self.greedy:
            step.best_ids = best_ids.data_ptr()
        norm = _fill_normed(engine, self.rows, self.k, step)
        ops = [Op(code=self.code, input=1, output=2, weight=copy.pointer) for copy in copies]
        return Recorded(engine, ops, step, self.work(copies[0]), (copies, logits, best_ids, norm))

    def work(self, weight: PackedWeight) -> Work:
        operations = 2 * self.rows * self.n * self.k
        return Work(weight.num_bytes, **{operations_of(self.kind): operations})


def operations_of(kind: Kind) -> str:
    """The field of Work for products with such weights."""
    types = {Codes.NONE: "float32", Codes.CODES16: "int16", Codes.CODES8: "int8"}
    return types[CODES_OF.get(kind, Codes.NONE)] + "_operations"


def _fill_normed(engine: Engine, rows: int, width: int, step: Step) -> torch.Tensor:
    """Random inputs in buffer 1, in all the forms that it has, by a norm of buffer 0; the norm's weight."""
    weight = torch.ones(width)
    engine.values(0, rows, width).copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(1)))
    ops = (Op * 1)(Op(code=Code.NORM, input=-1, residual=0, output=1, weight=weight.data_ptr(), eps=_EPS))
    engine.run(ops, step)
    return weight


@dataclass(frozen=True, slots=True)
class Norm:
    """Sum with the residual, and its norm, quantized as for a linear. Its data is in a cache, as it is in a step."""

    rows: int

    @property
    def name(self) -> str:
        return f"norm/{HIDDEN}/{self.rows}"

    def record(self, place: Place) -> Recorded:
        engine = Engine(place.library, place.threads)
        engine.set_buffers([BufferShape(HIDDEN), BufferShape(HIDDEN, Codes.CODES8), BufferShape(HIDDEN)])
        step = Step(tokens=self.rows)
        weight = _fill_normed(engine, self.rows, HIDDEN, step)
        engine.values(2, self.rows, HIDDEN).zero_()  # else the residual would grow without end
        op = Op(code=Code.NORM, input=2, residual=0, output=1, weight=weight.data_ptr(), eps=_EPS)
        # read: both summands, weight; a multiply-add for the sum of squares, a sum and two products
        work = Work(4 * HIDDEN * (2 * self.rows + 1), 5 * self.rows * HIDDEN)
        return Recorded(engine, [op] * _REPEATED, step, work, (weight,))


@dataclass(frozen=True, slots=True)
class Embed:
    """Rows of the vocabulary's table, at random, and from another part of it in each operation."""

    kind: Kind
    rows: int

    @property
    def name(self) -> str:
        return f"embed/{self.kind.name.lower()}/{VOCABULARY}x{HIDDEN}/{self.rows}"

    def record(self, place: Place) -> Recorded:
        table = place.weights.copies(self.kind, VOCABULARY, HIDDEN)[0]
        engine = Engine(place.library, place.threads)
        engine.set_buffers([BufferShape(HIDDEN)])
        ids = torch.randint(VOCABULARY // 2, (self.rows,), generator=torch.Generator().manual_seed(2))
        parts = torch.randint(VOCABULARY // 2, (_REPEATED,), generator=torch.Generator().manual_seed(3)).tolist()
        ops = [Op(code=Code.EMBED, output=0, weight=table.pointer, first=-part) for part in parts]
        work = Work(self.rows * table.num_bytes // VOCABULARY)
        return Recorded(engine, ops, Step(tokens=self.rows, token_ids=ids.data_ptr()), work, (table, ids))


@dataclass(frozen=True, slots=True)
class Attention:
    """ROPE or ATTENTION of `sequences` sequences: `tokens` new ones each, after `start` that are in the KV pool.

    With a `window`, queries attend to so many positions at most. Every operation has a layer of its own in the pool.
    """

    code: Code
    kv_type: KvType
    sequences: int
    tokens: int
    start: int
    window: int = 0

    @property
    def name(self) -> str:
        dtype = self.kv_type.name.lower()
        window = f"w{self.window}" if self.window else ""
        if self.code == Code.ROPE:
            return f"rope/{dtype}/{self.sequences * self.tokens}"
        if self.tokens == 1:
            return f"decode/{dtype}/{self.sequences}x{self.start + 1}{window}"
        return f"prefill/{dtype}/{self.tokens}@{self.start}{window}"

    @property
    def work(self) -> Work:
        # of a key or value of a head
        kept = {KvType.FLOAT32: 4 * HEAD_DIM, KvType.INT8: HEAD_DIM + 4}.get(self.kv_type, 2 * HEAD_DIM)
        total = self.sequences * self.tokens
        if self.code == Code.ROPE:
            # read: q, k and v; three operations for each element of q and k
            return Work(4 * total * (HEADS + 2 * KV_HEADS) * HEAD_DIM, 3 * total * (HEADS + KV_HEADS) * HEAD_DIM)
        context = self.start + self.tokens
        window = self.window or context
        # causal: of each query those up to itself
        keys = self.sequences * sum(min(seen, window) for seen in range(self.start + 1, context + 1))
        unseen = max(0, self.start + 1 - window)  # not even by the first query
        return Work(
            self.sequences * (context - unseen) * 2 * KV_HEADS * kept,
            2 * 2 * keys * HEADS * HEAD_DIM,  # scores, and the sum of values
        )

    def record(self, place: Place) -> Recorded:
        context = self.start + self.tokens
        width = -(-context // BLOCK_SIZE)
        num_blocks = self.sequences * width
        cos = torch.ones(context, HEAD_DIM // 2)
        sin = torch.zeros_like(cos)
        sizes = AttentionSizes(HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, kv_type=self.kv_type)
        layer_bytes = num_blocks * kv_block_bytes(place.library, sizes)
        layers = max(1, min(place.working_set, _MOST_KV_BYTES) // layer_bytes)
        sizes.num_layers = layers
        pool = _filled_pool(layers * layer_bytes, self.kv_type)
        sizes.cos, sizes.sin, sizes.kv = cos.data_ptr(), sin.data_ptr(), pool.ctypes.data
        q_width = HEADS * HEAD_DIM
        qkv_width = q_width + 2 * KV_HEADS * HEAD_DIM
        engine = Engine(place.library, place.threads)
        engine.set_attention(sizes)
        engine.set_buffers([BufferShape(qkv_width), BufferShape(q_width), BufferShape(q_width)])
        total = self.sequences * self.tokens
        engine.values(0, total, qkv_width).fill_(0.5)
        engine.values(1, total, q_width).fill_(0.5)
        tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4)).int().view(-1, width)
        positions = torch.arange(self.start, context).repeat(self.sequences)
        sequence = torch.arange(self.sequences).repeat_interleave(self.tokens)
        slots = tables[sequence, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = torch.arange(self.sequences + 1) * self.tokens
        contexts = torch.full((self.sequences,), context)
        table_rows = torch.arange(self.sequences)
        step = Step(
            tokens=total,
            sequences=self.sequences,
            table_width=width,
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            query_starts=starts.data_ptr(),
            context_lens=contexts.data_ptr(),
            block_tables=tables.data_ptr(),
            table_rows=table_rows.data_ptr(),
        )
        source, into = (0, 1) if self.code == Code.ROPE else (1, 2)
        ops = [
            Op(code=self.code, input=source, output=into, layer=layer, window=self.window) for layer in range(layers)
        ]
        kept = (cos, sin, pool, tables, table_rows, positions, slots, starts, contexts)
        return Recorded(engine, ops, step, self.work, kept)


def _filled_pool(num_bytes: int, kv_type: KvType) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Keys and values of one and the same number, at a multiple of 64; written, since unwritten pages share memory.

    Of int8, the bytes of float32: scales of 0.5, codes of 0 and 63.
    """
    memory = np.empty(num_bytes + 63, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    pool = memory[start : start + num_bytes]
    if kv_type == KvType.BFLOAT16:
        pool.view(np.uint16)[:] = 0x3F00  # 0.5
    else:
        pool.view(np.float16 if kv_type == KvType.FLOAT16 else np.float32)[:] = 0.5
    return pool


def linear_cases(shapes: Sequence[tuple[int, int]]) -> Iterator[Linear]:
    """The linears of a layer and the head, or with `shapes` [N, K] only those."""
    layer = [
        (Code.LINEAR, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, False),
        (Code.LINEAR, HIDDEN, HEADS * HEAD_DIM, False),
        (Code.GATED, 2 * FFN, HIDDEN, False),
        (Code.LINEAR, HIDDEN, FFN, False),
        (Code.LOGITS, VOCABULARY, HIDDEN, False),
        (Code.LOGITS, VOCABULARY, HIDDEN, True),
    ]
    wanted = [(Code.LINEAR, n, k, False) for n, k in shapes] if shapes else layer
    for kind in Kind:
        for code, n, k, greedy in wanted:
            for rows in LINEAR_ROWS:
                yield Linear(code, kind, n, k, rows, greedy)


def all_cases(shapes: Sequence[tuple[int, int]]) -> list[Case]:
    """In the order in which they share weights. `shapes` [N, K], if any, replace the linears of the model."""
    cases: list[Linear | Norm | Embed | Attention] = [*linear_cases(shapes)]
    cases += [Norm(rows) for rows in ROWS]
    for kv_type in KvType:
        cases += [Attention(Code.ROPE, kv_type, rows, 1, 127) for rows in ROWS]
        cases += [Attention(Code.ATTENTION, kv_type, sequences, 1, context - 1) for sequences, context in DECODE]
        cases += [
            Attention(Code.ATTENTION, kv_type, sequences, 1, WINDOW_CONTEXT - 1, WINDOW) for sequences in (1, 8, 32)
        ]
        cases += [Attention(Code.ATTENTION, kv_type, 1, PREFILL_TOKENS, start) for start in PREFILL_STARTS]
        cases.append(Attention(Code.ATTENTION, kv_type, 1, PREFILL_TOKENS, PREFILL_STARTS[-1], WINDOW))
    cases += [Embed(kind, rows) for kind in Kind for rows in ROWS]
    return [Case(case.name, case.record) for case in cases]
