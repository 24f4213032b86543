"""Causal attention of the new tokens of many sequences over a paged KV pool: prefill, chunks, decode rows among them.

FlashAttention-2 (Dao 2023) with the keys and values of a tile gathered through the block table. The query heads of a KV
head are rows of one matrix, token by token, so that few tokens fill it too and a key is read once for all of them.

The tables' settings were chosen by counting, on no device. On sm_90 a prompt of 8192 tokens of Llama-3.1-8B (D = 128)
is 550 GFLOP a layer: 0.56 ms at the 989 TFLOP/s of an H200's tensor cores in bfloat16. Its products of 128 rows with
128 keys take them 2048 cycles, and the warps' 552 instructions take a multiprocessor's four schedulers 1104: from 65%
of that peak, where nothing overlaps, to near it. With D = 64 (128 rows, 64 keys) products take 512 cycles, instructions
518 and exponentials alone 512: from 50%. Two thread blocks of D = 64 fit a multiprocessor, and one of D = 128.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_tile import HEAD_STEP, LARGEST_HEAD, attend, empty_state, merge, score_factors
from kernels.gpu.launch import cdiv, launch
from kernels.gpu.numbers import as_bytes, native_e4m3
from kernels.gpu.tables import choose

_SEARCHED = tl.constexpr(256)  # sequences looked at in one go
# Parts of a batch begin anywhere in these: no other code for where.
_SMALL = ["block_tables", "query_starts", "context_lens"]
MOST_PARTIAL_BYTES = 64 << 20  # of partial results; what would take more is not split
_ENOUGH_PROGRAMS = 1024  # several for each multiprocessor: no need to split sequences


def choice(head_dim: int, kv_dtype: torch.dtype, rows: int, *, deterministic: bool) -> tuple[str, dict[str, int]]:
    """The kernel's name in the tables of settings, and what these are chosen by; `rows` of a KV head, at most.

    Where bits must not depend on the batch, nor may settings.
    """
    shape = {"head_dim": head_dim, "kv_bytes": kv_dtype.itemsize}
    return (
        ("prefill_attention_deterministic", shape) if deterministic else ("prefill_attention", shape | {"rows": rows})
    )


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    deterministic: bool = False,
    max_context: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [T, H, D] over pools [blocks, G, block size, D] -> [T, H, D], contiguous, of q's dtype.

    Sequence i of B owns the rows query_starts[i]..query_starts[i + 1] - 1 of q, which are the last of its
    context_lens[i] positions, and whose keys and values are in the pools already; position p lies in block
    block_tables[i, p // block size]. Rows of q that no sequence owns are not written. A query at position p sees the
    positions 0..p, with `window` the last `window` of them; a score is s = scale * q.k, with `soft_cap` soft_cap *
    tanh(s / soft_cap) (Gemma 2). Nothing else is read: positions behind a window may be in use by others.

    q is float32, float16 or bfloat16; its heads and tokens may be strided, not D, which is a multiple of 16 up to 256.
    The pools are of q's dtype, or int8 or float8_e4m3fn: then a value is its code, times `k_scales` and `v_scales`
    [blocks, G, block size] float32 where these are given. Blocks and heads may be strided, the same in both pools.
    block_tables [B, blocks of a sequence], query_starts [B + 1], from 0, and context_lens [B] are int32, on the device.

    `max_query_len` and `max_context` bound the sequences' query and context lengths. With `max_context` (0: not known)
    few sequences of few queries are split over programs by segments of keys.

    `deterministic`: a row's bits don't depend on the batch, on how its prompt is chunked, or on `max_context`. Rows are
    independent in every product; one set of block sizes is used for all; tiles of keys count from position 0, and so do
    segments, whose results are merged in order and by the same operations in a program and in `_combine`. The tests
    compare bits under the interpreter, whose products are numpy's, and with tensor cores where there is a GPU.
    """
    num_tokens, num_heads, head_dim = q.shape
    if head_dim % HEAD_STEP or head_dim > LARGEST_HEAD:
        raise ValueError(f"head_dim {head_dim} is not a multiple of {HEAD_STEP} up to {LARGEST_HEAD}")
    num_groups, block_size = k_pool.shape[1:3]
    num_sequences = context_lens.shape[0]
    repeats = num_heads // num_groups
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kernel, shape = choice(head_dim, k_pool.dtype, max_query_len * repeats, deterministic=deterministic)
    settings = choose(kernel, **shape)
    block_m, segment = settings["BLOCK_M"], settings["SEGMENT"]
    factor, inner = score_factors(scale, soft_cap)
    tensors = (q, as_bytes(k_pool), as_bytes(v_pool), k_scales, v_scales, block_tables, query_starts, context_lens)
    strides = (q.stride(0), q.stride(1), k_pool.stride(0) // 16, k_pool.stride(1), block_tables.stride(0))
    constants = {
        "REPEATS": repeats,
        "HEAD_DIM": head_dim,
        "WIDTH": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": block_m,
        "TILE": settings["TILE"],
        "SCALED": k_scales is not None,
        "SOFT_CAPPED": soft_cap > 0,
        "WINDOWED": window > 0,
        "NATIVE": native_e4m3(),
        "fp_fusion": False,
        **{name: value for name, value in settings.items() if name not in ("BLOCK_M", "TILE", "SEGMENT")},
    }
    segments = cdiv(max_context, segment)
    partial_bytes = num_sequences * max_query_len * num_heads * segments * (head_dim + 2) * 4
    small = max_query_len * repeats <= block_m and num_sequences * num_groups < _ENOUGH_PROGRAMS
    if segments <= 1 or not small or partial_bytes > MOST_PARTIAL_BYTES:
        launch(
            _prefill,
            (num_tokens * repeats // block_m + num_sequences, num_groups),
            *tensors,
            out,
            *strides,
            num_sequences,
            window,
            factor,
            inner,
            SEGMENT=segment if deterministic else 0,
            **constants,
        )
        return out
    places = (num_sequences * max_query_len, num_heads, segments)
    states = torch.empty((*places, 2), dtype=torch.float32, device=q.device)
    values = torch.empty((*places, head_dim), dtype=torch.float32, device=q.device)
    launch(
        _prefill_segment,
        (num_sequences, num_groups, segments),
        *tensors,
        states,
        values,
        *strides,
        max_query_len,
        window,
        factor,
        inner,
        SEGMENT=segment,
        **constants,
    )
    launch(
        _combine,
        (num_sequences * max_query_len, num_groups),
        states,
        values,
        query_starts,
        context_lens,
        out,
        max_query_len,
        segments,
        window,
        REPEATS=repeats,
        ROWS=triton.next_power_of_2(repeats),
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        SEGMENT=segment,
        fp_fusion=False,
    )
    return out


@triton.jit
def _sequence_of(tile, query_starts, num_sequences, REPEATS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(sequence, tile in it). Sequence i has the tiles from query_starts[i] * REPEATS // BLOCK_M + i on: enough."""
    found = 0
    for first in tl.range(0, num_sequences, _SEARCHED):
        sequences = first + tl.arange(0, _SEARCHED)
        starts = tl.load(query_starts + sequences, mask=sequences < num_sequences, other=0)
        begun = (starts * REPEATS // BLOCK_M + sequences <= tile) & (sequences < num_sequences)
        found += tl.sum(begun.to(tl.int32))
    sequence = found - 1
    return sequence, tile - tl.load(query_starts + sequence) * REPEATS // BLOCK_M - sequence


@triton.jit
def _lengths_of(sequence, query_starts, context_lens, AGAIN: tl.constexpr):
    """(its first row of q, queries, context). AGAIN: read them again, though they are known.

    What is computed from these before the loop over keys and after it then takes up no registers in between.
    """
    start = tl.load(query_starts + sequence, volatile=AGAIN)
    end = tl.load(query_starts + sequence + 1, volatile=AGAIN)
    return start, end - start, tl.load(context_lens + sequence, volatile=AGAIN)


@triton.jit
def _rows_of(tile, num_queries, REPEATS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(query, head of the group, whether it exists) of a tile's rows."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = rows // REPEATS
    return queries, rows % REPEATS, queries < num_queries


@triton.jit
def _positions_of(tile, queries, num_queries, context, REPEATS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(position of each of a tile's rows, the first, the last); rows that don't exist are at the sequence's end."""
    before = context - num_queries
    first = before + tile * BLOCK_M // REPEATS
    last = tl.minimum(before + (tile * BLOCK_M + BLOCK_M - 1) // REPEATS, context - 1)
    return tl.minimum(before + queries, context - 1), first, last


@triton.jit
def _load_queries(
    q, tokens, heads, exists, q_stride, q_head_stride, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """[M, WIDTH]: 0 in the columns from HEAD_DIM on and in rows that don't exist."""
    columns = tl.arange(0, WIDTH)
    pointers = q + (tokens.to(tl.int64) * q_stride + heads * q_head_stride)[:, None] + columns[None, :]
    return tl.load(pointers, mask=exists[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "window"], do_not_specialize_on_alignment=_SMALL)
def _prefill(
    q, k_pool, v_pool, k_scales, v_scales, block_tables, query_starts, context_lens, out, q_stride, q_head_stride,
    block_stride, head_stride, table_stride, num_sequences, window, factor, inner,
    REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, SEGMENT: tl.constexpr, SCALED: tl.constexpr, SOFT_CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Programs (tile of queries, KV head), over all keys.

    With SEGMENT each segment of keys has a state of its own, merged into the row's.
    """
    sequence, tile = _sequence_of(tl.program_id(0), query_starts, num_sequences, REPEATS, BLOCK_M)
    start, num_queries, context = _lengths_of(sequence, query_starts, context_lens, False)
    num_tiles = tl.cdiv(num_queries * REPEATS, BLOCK_M)
    if tile >= num_tiles:
        return
    from_end = tile
    tile = num_tiles - 1 - tile  # the last queries see the most keys: those begin first
    group = tl.program_id(1)
    queries, heads, exists = _rows_of(tile, num_queries, REPEATS, BLOCK_M)
    positions, first_position, last_position = _positions_of(tile, queries, num_queries, context, REPEATS, BLOCK_M)
    tokens, heads = start + queries, group * REPEATS + heads
    rows = _load_queries(q, tokens, heads, exists, q_stride, q_head_stride, HEAD_DIM, WIDTH)
    table = block_tables + sequence.to(tl.int64) * table_stride
    k, v = k_pool + group.to(tl.int64) * head_stride, v_pool + group.to(tl.int64) * head_stride
    scale_stride = tl.num_programs(1) * BLOCK_SIZE
    if SCALED:
        k_scales += group * BLOCK_SIZE
        v_scales += group * BLOCK_SIZE
    if SEGMENT:
        first_key = 0
        if WINDOWED:
            first_key = tl.maximum(first_position - window + 1, 0)
        largest, total, values = empty_state(BLOCK_M, WIDTH)
        for begin in tl.range(first_key // SEGMENT * SEGMENT, last_position + 1, SEGMENT):
            of_segment = attend(
                rows, positions, first_position, last_position, begin, begin + SEGMENT, table, k, v, k_scales,
                v_scales, block_stride, scale_stride, window, factor, inner, HEAD_DIM, BLOCK_SIZE, TILE, SCALED,
                SOFT_CAPPED, WINDOWED, NATIVE,
            )  # fmt: skip
            largest, total, values = merge(largest, total, values, of_segment[0], of_segment[1], of_segment[2])
    else:
        largest, total, values = attend(
            rows, positions, first_position, last_position, 0, last_position + 1, table, k, v, k_scales, v_scales,
            block_stride, scale_stride, window, factor, inner, HEAD_DIM, BLOCK_SIZE, TILE, SCALED, SOFT_CAPPED,
            WINDOWED, NATIVE,
        )  # fmt: skip
    start, num_queries, context = _lengths_of(sequence, query_starts, context_lens, True)
    tile = tl.cdiv(num_queries * REPEATS, BLOCK_M) - 1 - from_end
    queries, heads, exists = _rows_of(tile, num_queries, REPEATS, BLOCK_M)
    columns = tl.arange(0, WIDTH)
    places = ((start + queries).to(tl.int64) * (tl.num_programs(1) * REPEATS) + group * REPEATS + heads) * HEAD_DIM
    tl.store(
        out + places[:, None] + columns[None, :],
        (values / total[:, None]).to(out.dtype.element_ty),
        mask=exists[:, None] & (columns < HEAD_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["table_stride", "max_queries", "window"], do_not_specialize_on_alignment=_SMALL)
def _prefill_segment(
    q, k_pool, v_pool, k_scales, v_scales, block_tables, query_starts, context_lens, states, partial_values,
    q_stride, q_head_stride, block_stride, head_stride, table_stride, max_queries, window, factor, inner,
    REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, SEGMENT: tl.constexpr, SCALED: tl.constexpr, SOFT_CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Programs (sequence, KV head, segment of keys), of sequences whose queries are one tile.

    Writes the state of query t of sequence i at row i * max_queries + t of partial_values [rows, H, segments, D], and
    (largest, total) in states [rows, H, segments, 2]. Segments that the tile doesn't see are not written.
    """
    sequence = tl.program_id(0)
    start, num_queries, context = _lengths_of(sequence, query_starts, context_lens, False)
    if num_queries == 0:
        return
    group = tl.program_id(1)
    queries, heads, exists = _rows_of(0, num_queries, REPEATS, BLOCK_M)
    positions, first_position, last_position = _positions_of(0, queries, num_queries, context, REPEATS, BLOCK_M)
    begin = tl.program_id(2) * SEGMENT
    if begin > last_position:
        return
    if WINDOWED and begin + SEGMENT <= first_position - window + 1:
        return
    tokens, heads = start + queries, group * REPEATS + heads
    rows = _load_queries(q, tokens, heads, exists, q_stride, q_head_stride, HEAD_DIM, WIDTH)
    table = block_tables + sequence.to(tl.int64) * table_stride
    k, v = k_pool + group.to(tl.int64) * head_stride, v_pool + group.to(tl.int64) * head_stride
    scale_stride = tl.num_programs(1) * BLOCK_SIZE
    if SCALED:
        k_scales += group * BLOCK_SIZE
        v_scales += group * BLOCK_SIZE
    largest, total, values = attend(
        rows, positions, first_position, last_position, begin, begin + SEGMENT, table, k, v, k_scales, v_scales,
        block_stride, scale_stride, window, factor, inner, HEAD_DIM, BLOCK_SIZE, TILE, SCALED, SOFT_CAPPED, WINDOWED,
        NATIVE,
    )  # fmt: skip
    start, num_queries, context = _lengths_of(sequence, query_starts, context_lens, True)
    queries, heads, exists = _rows_of(0, num_queries, REPEATS, BLOCK_M)
    columns = tl.arange(0, WIDTH)
    places = (sequence * max_queries + queries).to(tl.int64) * (tl.num_programs(1) * REPEATS) + group * REPEATS + heads
    places = places * tl.num_programs(2) + tl.program_id(2)
    tl.store(
        partial_values + (places * HEAD_DIM)[:, None] + columns[None, :],
        values,
        mask=exists[:, None] & (columns < HEAD_DIM)[None, :],
    )
    tl.store(states + places * 2, largest, mask=exists)
    tl.store(states + places * 2 + 1, total, mask=exists)


@triton.jit(
    do_not_specialize=["max_queries", "segments", "window"],
    do_not_specialize_on_alignment=["query_starts", "context_lens"],
)
def _combine(
    states, partial_values, query_starts, context_lens, out, max_queries, segments, window,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Programs (row of the states, KV head): merges what `_prefill_segment` wrote, in the order of keys."""
    sequence = tl.program_id(0) // max_queries
    query = tl.program_id(0) % max_queries
    start, num_queries, context = _lengths_of(sequence, query_starts, context_lens, False)
    if query >= num_queries:
        return
    position = context - num_queries + query
    first_key = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    num_heads = tl.num_programs(1) * REPEATS
    heads = tl.arange(0, ROWS)
    exists = heads < REPEATS
    heads += tl.program_id(1) * REPEATS
    columns = tl.arange(0, WIDTH)
    mask = exists[:, None] & (columns < HEAD_DIM)[None, :]
    places = (tl.program_id(0).to(tl.int64) * num_heads + heads) * segments
    largest, total, values = empty_state(ROWS, WIDTH)
    for segment in tl.range(first_key // SEGMENT, tl.cdiv(position + 1, SEGMENT)):  # none of a graph's padding
        at = places + segment
        more_largest = tl.load(states + at * 2, mask=exists, other=0.0)
        more_total = tl.load(states + at * 2 + 1, mask=exists, other=1.0)
        more_values = tl.load(partial_values + (at * HEAD_DIM)[:, None] + columns[None, :], mask=mask, other=0.0)
        largest, total, values = merge(largest, total, values, more_largest, more_total, more_values)
    places = ((start + query).to(tl.int64) * num_heads + heads) * HEAD_DIM
    tl.store(out + places[:, None] + columns[None, :], (values / total[:, None]).to(out.dtype.element_ty), mask=mask)
