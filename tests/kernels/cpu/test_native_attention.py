"""Rotation, KV writes and paged attention of the native backend against the oracle, and their bits in any batch.

The oracle's keys and values are rounded as the pool's are, which leaves float32 rounding only.
"""

import ctypes
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_workers.backends.native_cpu import NativeCpuBackend
from gpu_workers.backends.native_kv import NativeKV
from gpu_workers.backends.native_recording import Value
from gpu_workers.batch import ForwardBatch
from kernels import reference
from kernels.cpu.library import KvType

from .layer import kept
from .recorded import Op, Prepare, Recorded

EXAMPLES = settings(max_examples=settings.default.max_examples // 4, deadline=None)
LAYERS, LAYER = 2, 1
# Around tiles of 64 positions and splits of 512, and of as many as blocks of 24 make of these: 48 and 504.
CONTEXTS = [
    1,
    2,
    7,
    8,
    9,
    47,
    48,
    49,
    63,
    64,
    65,
    127,
    128,
    129,
    200,
    503,
    504,
    505,
    511,
    512,
    513,
    576,
    1023,
    1030,
    1200,
]
WINDOWS = [0, 1, 2, 7, 16, 47, 48, 49, 63, 64, 65, 100, 127, 128, 129, 503, 504, 511, 512, 513, 577, 1100, 1200]


@pytest.fixture(autouse=True)
def compiled(library: ctypes.CDLL) -> Iterator[None]:
    """Skips where there are no native kernels; leaves torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Shapes:
    contexts: tuple[int, ...]
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    kv_dtype: str
    seed: int
    window: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@st.composite
def shapes(draw: st.DrawFn) -> Shapes:
    group = draw(st.sampled_from([1, 2, 3, 8]))
    return Shapes(
        contexts=tuple(draw(st.lists(st.sampled_from(CONTEXTS), min_size=1, max_size=3))),
        kv_heads=draw(st.integers(1, 1 if group == 8 else 3)),
        group=group,
        head_dim=draw(st.sampled_from([10, 20, 64, 80, 128])),
        block_size=draw(st.sampled_from([1, 8, 16, 24, 128])),
        kv_dtype=draw(st.sampled_from(["float32", "bfloat16", "float16", "int8"])),
        seed=draw(st.integers(0, 1 << 30)),
        window=draw(st.sampled_from(WINDOWS)),
    )


def attention(heads: int, window: int) -> Prepare:
    def prepare(backend: NativeCpuBackend) -> Op:
        def op(x: Value, batch: ForwardBatch, kv: NativeKV) -> Value:
            return backend.attention(backend.rope_and_write(x, heads, kv, LAYER, batch), kv, LAYER, batch, window)

        return op

    return prepare


def rope(heads: int) -> Prepare:
    return lambda backend: lambda x, batch, kv: backend.rope_and_write(x, heads, kv, LAYER, batch)


class Sequences:
    """Query, key and value rows of some sequences, and blocks for them scattered over a pool."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        generator, shuffle = torch.Generator().manual_seed(shapes.seed), random.Random(shapes.seed)
        total, size = sum(shapes.contexts), shapes.block_size
        width = (shapes.heads + 2 * shapes.kv_heads) * shapes.head_dim
        # bfloat16 numbers, which an embedding holds exactly; scores up to about 10
        self.qkv = (1.5 * torch.randn(total, width, generator=generator)).bfloat16().float()
        self.starts = [sum(shapes.contexts[:index]) for index in range(len(shapes.contexts))]
        counts = [-(-context // size) for context in shapes.contexts]
        self.num_blocks = sum(counts) + 2
        free = list(range(self.num_blocks))
        shuffle.shuffle(free)
        self.tables = torch.full((len(counts), max(counts) + 1), 1 << 30, dtype=torch.int32)
        for table, count in zip(self.tables, counts, strict=True):
            table[:count] = torch.tensor([free.pop() for _ in range(count)])
        frequencies, scale = reference.rope_frequencies(shapes.head_dim, 1e4)
        self.cos, self.sin = reference.rope_tables(frequencies, scale, max(shapes.contexts))

    def recorded(self, threads: int = 1, prepare: Prepare | None = None) -> Recorded:
        shapes = self.shapes

        def with_tables(backend: NativeCpuBackend) -> Op:
            backend.load_rope(self.cos, self.sin)
            return (prepare or attention(shapes.heads, shapes.window))(backend)

        pool = (LAYERS, self.num_blocks, shapes.block_size, shapes.kv_heads, shapes.head_dim)
        recorded = Recorded(self.qkv, with_tables, shapes.heads * shapes.head_dim, threads, shapes.kv_dtype, pool)
        assert recorded.kv.pool.ctypes.data % 64 == 0
        recorded.kv.pool[:] = 255  # all bits set is NaN: reading a place that was never written shows
        return recorded

    def write_before(self, parts: list[tuple[int, int, int]], recorded: Recorded, start: int = 0) -> None:
        """Keys and values of the positions from `start` to `parts` into a pool; quicker than attention over them."""
        before = [(sequence, start, begin) for sequence, begin, _ in parts if begin > start]
        if before:
            self.recorded(prepare=rope(self.shapes.heads)).run(self.batch(before), recorded.kv)

    def batch(self, parts: list[tuple[int, int, int]]) -> ForwardBatch:
        """Positions begin..end of parts (sequence, begin, end)."""
        size = self.shapes.block_size
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in parts])
        owners = torch.cat([torch.full((end - begin,), sequence) for sequence, begin, end in parts])
        starts = [0]
        for _, begin, end in parts:
            starts.append(starts[-1] + end - begin)
        return ForwardBatch(
            token_ids=torch.tensor(self.starts)[owners] + positions,
            positions=positions,
            slots=self.tables[owners, positions // size].long() * size + positions % size,
            query_starts=starts,
            context_lens=[end for _, _, end in parts],
            block_tables=self.tables[[sequence for sequence, _, _ in parts]],
            logits_rows=torch.arange(len(positions)),
        )

    def rotated(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [total, heads, D] rotated in float32, and v."""
        shapes = self.shapes
        positions = torch.cat([torch.arange(context) for context in shapes.contexts])
        heads = self.qkv.unflatten(-1, (-1, shapes.head_dim))
        q, k, v = heads.split([shapes.heads, shapes.kv_heads, shapes.kv_heads], dim=1)
        q, k = (reference.apply_rope(part, self.cos[positions], self.sin[positions]) for part in (q, k))
        return q, k, v

    def expected(self, parts: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's results in float64, and the largest value of each sequence's V for each row."""
        q, k, v = self.rotated()
        k, v = (kept(part, KvType[self.shapes.kv_dtype.upper()]) for part in (k, v))
        whole = self.batch([(sequence, 0, context) for sequence, context in enumerate(self.shapes.contexts)])
        pools = [torch.zeros(self.num_blocks * self.shapes.block_size, *k.shape[1:]).double() for _ in range(2)]
        for pool, values in zip(pools, (k, v), strict=True):
            pool[whole.slots] = values.double()
        batch = self.batch(parts)
        result = reference.paged_attention(
            q[batch.token_ids].double(),
            *pools,
            batch.block_tables,
            self.shapes.block_size,
            batch.query_starts,
            batch.context_lens,
            self.shapes.window,
        )
        return result.flatten(1), v.double().abs().amax()


def some_queries(contexts: tuple[int, ...], shuffle: random.Random) -> list[tuple[int, int, int]]:
    """The last few positions of each sequence, one or a chunk, in any order."""
    parts = []
    for sequence, context in enumerate(contexts):
        count = min(shuffle.choice((1, 1, 2, 8, 9, 16, 17, 40, 70)), context)
        parts.append((sequence, context - count, context))
    shuffle.shuffle(parts)
    return parts


@EXAMPLES
@given(shapes=shapes(), threads=st.integers(1, 3))
@example(shapes=Shapes((1200, 513, 64), 1, 8, 128, 128, "bfloat16", 0), threads=2)
@example(shapes=Shapes((1023, 505, 1), 3, 3, 64, 24, "float32", 1), threads=3)
@example(shapes=Shapes((1200, 1030, 200), 1, 8, 64, 16, "float16", 2, window=64), threads=2)
@example(shapes=Shapes((1200, 576, 129), 3, 1, 20, 24, "float32", 3, window=513), threads=1)
@example(shapes=Shapes((1200, 505, 65), 1, 3, 64, 16, "int8", 4, window=300), threads=2)
def test_attention_over_pages(shapes: Shapes, threads: int) -> None:
    """Chunks and single tokens of several sequences, over keys that an earlier step has written."""
    sequences, shuffle = Sequences(shapes), random.Random(shapes.seed)
    recorded = sequences.recorded(threads)
    parts = some_queries(shapes.contexts, shuffle)
    sequences.write_before(parts, recorded)
    actual = recorded.run(sequences.batch(parts)).double()
    expected, largest = sequences.expected(parts)
    # Scores of some tens are rounded to some 1e-6, and weights with them.
    assert (actual - expected).abs().max() <= 1e-5 * largest
    assert (recorded.kv.pool[:, 1 - LAYER] == 255).all(), "another layer was written to"
    unused = sorted(set(range(sequences.num_blocks)) - set(sequences.tables.flatten().tolist()))
    assert len(unused) == 2
    assert (recorded.kv.pool[unused, LAYER] == 255).all(), "blocks of nobody were written to"


@pytest.mark.parametrize("begin", [1130, 1199])
def test_tiles_in_front_of_a_window_are_not_read(begin: int) -> None:
    sequences = Sequences(Shapes((1200,), 1, 3, 64, 16, "float16", 0, window=43))
    part = [(0, begin, 1200)]
    recorded = sequences.recorded()
    first_seen = begin - 42
    sequences.write_before(part, recorded, start=first_seen // 64 * 64)  # what is before it stays NaN
    expected, largest = sequences.expected(part)
    actual = recorded.run(sequences.batch(part)).double()
    assert (actual - expected).abs().max() <= 1e-5 * largest


@pytest.mark.parametrize("sign", [1, -1])
def test_what_float16_cannot_hold_is_held_as_its_largest_number(sign: int) -> None:
    """An infinite value would be NaN in the results of tokens before it, since 0 times it is."""
    sequences = Sequences(Shapes((40,), 1, 3, 64, 16, "float16", 0))
    sequences.qkv[20, -5] = sign * 2.0**20
    before = sequences.recorded().run(sequences.batch([(0, 0, 20)]))
    whole = sequences.recorded().run(sequences.batch([(0, 0, 40)])).clone()
    assert torch.equal(whole[:20], before)
    sequences.qkv[20, -5] = sign * torch.finfo(torch.float16).max
    assert torch.equal(sequences.recorded().run(sequences.batch([(0, 0, 40)])), whole)
    assert whole.isfinite().all()


@EXAMPLES
@given(shapes=shapes())
def test_queries_are_rotated_and_scaled_by_their_positions(shapes: Shapes) -> None:
    sequences = Sequences(shapes)
    parts = [(sequence, context // 2, context) for sequence, context in enumerate(shapes.contexts)]
    batch = sequences.batch(parts)
    actual = sequences.recorded(prepare=rope(shapes.heads)).run(batch).double()
    q, _, _ = sequences.rotated()
    # Scores are exponents of two.
    expected = q[batch.token_ids].double().flatten(1) * math.log2(math.e) / math.sqrt(shapes.head_dim)
    torch.testing.assert_close(actual, expected, rtol=5e-7, atol=0)


@EXAMPLES
@given(shapes=shapes(), data=st.data())
def test_attention_has_the_same_bits_in_any_chunks_company_and_threads(shapes: Shapes, data: st.DataObject) -> None:
    sequences = Sequences(shapes)
    shuffle = random.Random(data.draw(st.integers(0, 1 << 30), label="chunks"))
    begins = [max(0, context - 100) for context in shapes.contexts]
    chunks = [(sequence, begins[sequence], context) for sequence, context in enumerate(shapes.contexts)]
    alone = sequences.recorded()
    expected = torch.full((sum(shapes.contexts), shapes.heads * shapes.head_dim), torch.nan)
    for chunk in chunks:
        sequences.write_before([chunk], alone)
        batch = sequences.batch([chunk])
        expected[batch.token_ids] = alone.run(batch)
    for threads in (1, 2, 3):
        recorded = sequences.recorded(threads)
        sequences.write_before(chunks, recorded)
        done = begins.copy()
        while waiting := [i for i, context in enumerate(shapes.contexts) if done[i] < context]:
            parts = []
            for sequence in shuffle.sample(waiting, shuffle.randint(1, len(waiting))):
                end = min(done[sequence] + shuffle.choice((1, 2, 16, 17, 50, 100)), shapes.contexts[sequence])
                parts.append((sequence, done[sequence], end))
                done[sequence] = end
            batch = sequences.batch(parts)
            assert torch.equal(recorded.run(batch), expected[batch.token_ids]), (threads, parts)
