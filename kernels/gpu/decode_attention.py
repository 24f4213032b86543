"""Attention of one query, or a few, of each of many sequences over a paged KV pool: decode, and verification of drafts.

Split-KV attention ("flash decoding", Dao et al. 2023). The keys of a sequence are cut into splits. A program attends to
a split with all query heads of a KV head, so that keys are read once for them, and leaves a partial result, unless it
is the sequence's only one; `_combine` merges those in the order of keys. How long splits are depends on the sequence's
context alone, and they count from position 0: a row has the same bits in every batch, with every `max_context`, and
whichever program computes it.

The grid can't depend on the contexts, which a CUDA graph doesn't know when it is captured. So as many programs as the
device runs at a time share out the splits that there are: a program finds its next one in the running sum of the
sequences' splits, and what is beyond a context costs nothing.

What bounds it is reading K and V. An H200 (4.8 TB/s, 132 multiprocessors of 1.98 GHz) can read 18 bytes in a clock
cycle of a multiprocessor, which begins 128 lanes' worth of instructions meanwhile: 7.0 for a byte. Counted in the
machine code for sm_90 (D = 128, up to 16 rows), splits take 2.3 a byte of bfloat16, 4.1 of e4m3 and 4.6 of int8.
Groups of a single query head go the same way: products without tensor cores would take an instruction for an element
and another one to convert it, 1 a byte of bfloat16 and 2 of 8 bits, where operands and products of tensor cores take
0.2 and 0.4, padded to 16 rows as they are.
"""

import functools

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_tile import NOTHING, multiply, score_factors
from kernels.gpu.launch import cdiv, launch
from kernels.gpu.numbers import decode_pair, native_pairs
from kernels.gpu.tables import choose

# Of the keys of a split, unless it is a longer one: 256 positions of bfloat16 at head dimension 128. The partial
# results of 4 query heads, written and read, are 1/32 of what is read for them; at batch 1 and 8192 positions, 8 KV
# heads make 256 programs.
SPLIT_BYTES = 1 << 16
# Longer contexts have longer splits, so that partial results stay few: a sequence has up to this many for all KV heads
# together, but up to 16 for each of many heads, and 128 for each of few. At batch 1 they are three programs or more
# for each multiprocessor.
SPLITS_OF_HEADS = 512

_MOST_ROWS = 32  # of a program; more are several programs, which read the same keys
_COMBINE_WARPS = 4


def workspace_size(
    max_seqs: int,
    num_heads: int,
    head_dim: int,
    max_context: int,
    *,
    num_kv_heads: int,
    kv_dtype: torch.dtype,
    queries: int = 1,
) -> int:
    """Elements of float32 that `decode_attention` needs as `workspace` for up to `max_seqs` sequences."""
    splits = _max_splits(max_context, _shortest_split(head_dim, kv_dtype), num_kv_heads)
    return max_seqs * queries * num_heads * splits * (head_dim + 2) if splits > 1 else 0


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_context: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    queries: int = 1,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last `queries` positions of B sequences: q [B * queries, H, D] -> the same shape, contiguous.

    Rows i * queries .. i * queries + queries - 1 are those of sequence i, whose keys and values are in the pools
    [blocks, G, block size, D] already: of position p in block block_tables[i, p // block size]. The query at position p
    sees the positions 0..p, with `window` the last `window` of them; a score is s = scale * q.k, with `soft_cap`
    soft_cap * tanh(s / soft_cap) (Gemma 2). Queries at positions below 0 get zeros, as all of a sequence of length 0.
    Nothing else is read: blocks behind the window may be in use by others.

    q is float32, float16 or bfloat16; its rows and heads may be strided, not D, a multiple of 16 up to 256. The pools
    are of q's dtype, or int8 or float8_e4m3fn, with q rounded to float16: then a value is its code, times `k_scales`
    and `v_scales` [blocks, G, block size] float32 where these are given. Blocks and heads of the pools may be strided,
    alike in both. block_tables [B, blocks of a sequence] and context_lens [B] are int32, on the device; no context is
    above `max_context`.

    `workspace` is float32 of `workspace_size` elements or more, in use until the kernels have run; None: one is
    allocated. Raises ValueError when it is too small.
    """
    num_sequences = context_lens.shape[0]
    num_rows, num_heads, head_dim = q.shape
    num_groups, block_size = k_pool.shape[1:3]
    kv_dtype = k_pool.dtype
    split = _shortest_split(head_dim, kv_dtype)
    max_splits = _max_splits(max_context, split, num_groups)
    needed = workspace_size(
        num_sequences, num_heads, head_dim, max_context, num_kv_heads=num_groups, kv_dtype=kv_dtype, queries=queries
    )
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    elif workspace.numel() < needed:
        raise ValueError(f"the workspace has {workspace.numel()} elements, and {needed} are needed")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    packed = kv_dtype.itemsize == 1
    if packed:
        k_pool, v_pool = k_pool.view(torch.int16), v_pool.view(torch.int16)
    repeats = num_heads // num_groups
    shape = settings_shape(queries, repeats, head_dim, kv_dtype)
    settings = choose("decode_attention", **shape)
    block_m = shape["rows"]
    row_tiles = cdiv(queries * repeats, block_m)
    factor, inner = score_factors(scale, soft_cap)
    most_splits = _most_splits(num_groups)
    splits = {"QUERIES": queries, "SPLIT": split, "MOST_SPLITS": most_splits, "WINDOWED": window > 0}
    programs = num_sequences * max_splits * num_groups * row_tiles
    launch(
        _decode,
        (min(programs, settings["RESIDENT"] * _multiprocessors(q.device)),),
        q,
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        block_tables,
        context_lens,
        out,
        workspace,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        num_sequences,
        max_splits,
        window,
        factor,
        inner,
        HEAD_DIM=head_dim,
        GROUPS=num_groups,
        REPEATS=repeats,
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE=k_pool.stride(0),
        HEAD_STRIDE=k_pool.stride(1),
        SEQUENCES=max(triton.next_power_of_2(num_sequences), 128),
        ROW_TILES=row_tiles,
        BLOCK_M=block_m,
        TILE=settings["TILE"],
        WIDTH=max(triton.next_power_of_2(k_pool.shape[3]), 16),
        PACKED=packed,
        INT8=kv_dtype == torch.int8,
        NATIVE=packed and native_pairs(kv_dtype),
        SCALED=k_scales is not None,
        SOFT_CAPPED=soft_cap > 0,
        num_warps=settings["num_warps"],
        num_stages=settings["num_stages"],
        fp_fusion=False,
        **splits,
    )
    if max_splits > 1:
        launch(
            _combine,
            (num_rows, num_heads),
            workspace,
            context_lens,
            out,
            max_splits,
            window,
            HEAD_DIM=head_dim,
            WIDTH=triton.next_power_of_2(head_dim),
            PADDED_SPLITS=triton.next_power_of_2(most_splits),
            MERGED=settings["MERGED"],
            num_warps=_COMBINE_WARPS,
            fp_fusion=False,
            **splits,
        )
    return out


def settings_shape(queries: int, repeats: int, head_dim: int, kv_dtype: torch.dtype) -> dict[str, int]:
    """What settings are chosen by; `rows` of a program are the queries of `repeats` heads, or as many as fit."""
    rows = min(max(triton.next_power_of_2(queries * repeats), 16), _MOST_ROWS)
    return {"head_dim": head_dim, "kv_bytes": kv_dtype.itemsize, "rows": rows}


def _shortest_split(head_dim: int, kv_dtype: torch.dtype) -> int:
    """In positions: a power of 2. The splits of a sequence are this or a multiple, see `_splits_of`."""
    return SPLIT_BYTES // (triton.next_power_of_2(head_dim) * kv_dtype.itemsize)


def _most_splits(num_kv_heads: int) -> int:
    return min(max(SPLITS_OF_HEADS // num_kv_heads, 16), 128)


def _max_splits(max_context: int, shortest: int, num_kv_heads: int) -> int:
    """How many splits a sequence of up to `max_context` positions has at most."""
    return min(cdiv(max_context, shortest), _most_splits(num_kv_heads))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Of `device`; where there is none, few: under the interpreter programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _splits_of(
    contexts, window, QUERIES: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, WINDOWED: tl.constexpr
):
    """Of sequences: (positions of a split, the first key seen, the first split with one, splits from that on).

    A sequence without a key has a split too, so that somebody writes its zeros.
    """
    sizes = tl.maximum(tl.cdiv(contexts, SPLIT * MOST_SPLITS), 1) * SPLIT
    first_keys = contexts * 0
    if WINDOWED:
        first_keys = tl.maximum(contexts - QUERIES - window + 1, 0)
    first_splits = first_keys // sizes
    return sizes, first_keys, first_splits, tl.maximum(tl.cdiv(contexts, sizes) - first_splits, 1)


@triton.jit
def _readable(keys, first_key, end, WINDOWED: tl.constexpr):
    readable = keys < end
    if WINDOWED:
        readable &= keys >= first_key
    return readable


@triton.jit
def _find_blocks(
    table, start, first_key, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """The blocks of the keys from `start` on, a multiple of TILE: [TILE] int32, or one number where they lie in one."""
    if BLOCK_SIZE % TILE == 0:
        blocks = tl.load(table + start // BLOCK_SIZE)
    else:
        offsets = tl.arange(0, TILE)
        if TILE % BLOCK_SIZE == 0:
            entries = table + start // BLOCK_SIZE + offsets // BLOCK_SIZE
        else:
            entries = table + (start + offsets) // BLOCK_SIZE
        readable = _readable(start + offsets, first_key, end, WINDOWED)
        blocks = tl.load(entries, mask=readable, other=0)
    return blocks


@triton.jit
def _in_blocks(start, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """[TILE] int32: where in their blocks the keys from `start` on lie."""
    offsets = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE == 0:
        inside = offsets % BLOCK_SIZE  # the same in all tiles
    elif BLOCK_SIZE % TILE == 0:
        inside = start % BLOCK_SIZE + offsets
    else:
        inside = (start + offsets) % BLOCK_SIZE
    return inside


@triton.jit
def _split_scales(scales):
    """(exponent, 2^-exponent, rest), where scales = 2^exponent * rest and rest is below 2."""
    biased = tl.maximum(scales.to(tl.int32, bitcast=True) >> 23, 67)
    inverse = ((254 - biased) << 23).to(tl.float32, bitcast=True)
    return (biased - 127).to(tl.float32), inverse, scales * inverse


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "max_splits", "window"])
def _decode(
    q, k_pool, v_pool, k_scales, v_scales, block_tables, context_lens, out, workspace, q_stride, q_head_stride,
    table_stride, num_sequences, max_splits, window, factor, inner,
    QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, REPEATS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr, SEQUENCES: tl.constexpr, ROW_TILES: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr,
    SCALED: tl.constexpr, SOFT_CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Splits, shared out among all programs. A row of a tile is a query head of the group at one of the queries.

    The pools are given in words of two codes when PACKED; WIDTH is a row of them, rounded up to a power of 2. The state
    of row r, head h and split s, counted from the first that is seen, goes to place (r * H + h) * max_splits + s of
    `workspace`: values [places, D], then largest [places], then total [places].
    """
    sequences = tl.arange(0, SEQUENCES)
    exist = sequences < num_sequences
    contexts = tl.load(context_lens + sequences, mask=exist, other=0)
    _, _, _, counts = _splits_of(contexts, window, QUERIES, SPLIT, MOST_SPLITS, WINDOWED)
    counts = tl.where(exist, counts, 0)
    ends = tl.cumsum(counts, 0)
    of_split: tl.constexpr = GROUPS * ROW_TILES
    for item in tl.range(tl.program_id(0), tl.sum(counts, 0) * of_split, tl.num_programs(0)):
        # Programs of the same keys, and of blocks that lie side by side, run at the same time.
        group = item // ROW_TILES % GROUPS
        place = item // of_split
        passed = ends <= place
        sequence = tl.sum(passed.to(tl.int32), 0)
        split = place - tl.max(tl.where(passed, ends, 0), 0)
        context = tl.load(context_lens + sequence)
        size, first_key, first_split, count = _splits_of(context, window, QUERIES, SPLIT, MOST_SPLITS, WINDOWED)
        begin = (first_split + split) * size
        end = tl.minimum(begin + size, context)
        if WINDOWED:
            begin = tl.maximum(begin, first_key // TILE * TILE)

        members = item % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = members < QUERIES * REPEATS
        positions = context - QUERIES + members // REPEATS
        rows = (sequence * QUERIES + members // REPEATS).to(tl.int64)
        heads = group * REPEATS + members % REPEATS
        words = tl.arange(0, WIDTH)
        pointers = q + (rows * q_stride + heads * q_head_stride)[:, None]
        if PACKED:
            operand: tl.constexpr = tl.float16
            row_words: tl.constexpr = HEAD_DIM // 2
            in_row = exists[:, None] & (words < row_words)[None, :]
            q_low = tl.load(pointers + 2 * words[None, :], mask=in_row, other=0.0).to(operand)
            q_high = tl.load(pointers + 2 * words[None, :] + 1, mask=in_row, other=0.0).to(operand)
            values_high = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        else:
            operand: tl.constexpr = k_pool.dtype.element_ty
            row_words: tl.constexpr = HEAD_DIM
            in_row = exists[:, None] & (words < row_words)[None, :]
            q_rows = tl.load(pointers + words[None, :], mask=in_row, other=0.0).to(operand)
        values = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        totals = tl.zeros([BLOCK_M, TILE], tl.float32)  # summed up over the keys at the end
        largest = tl.full([BLOCK_M], NOTHING, tl.float32)

        table = block_tables + sequence.to(tl.int64) * table_stride
        k, v = k_pool + group.to(tl.int64) * HEAD_STRIDE, v_pool + group.to(tl.int64) * HEAD_STRIDE
        offsets = tl.arange(0, TILE)
        blocks = _find_blocks(table, begin, first_key, end, BLOCK_SIZE, TILE, WINDOWED)
        for start in tl.range(begin, end, TILE):
            keys = start + offsets
            readable = _readable(keys, first_key, end, WINDOWED)
            inside = _in_blocks(start, BLOCK_SIZE, TILE)
            wide = blocks.to(tl.uint32).to(tl.int64)
            places = (wide * BLOCK_STRIDE + inside * row_words)[:, None] + words[None, :]
            in_pool = readable[:, None] & (words < row_words)[None, :]
            k_rows = tl.load(k + places, mask=in_pool, other=0)
            if PACKED:
                k_low, k_high = decode_pair(k_rows, INT8, NATIVE)
                scores = multiply(q_high, tl.trans(k_high), multiply(q_low, tl.trans(k_low), None))
            else:
                scores = multiply(q_rows, tl.trans(k_rows), None)
            if SCALED:
                scales_at = wide * (GROUPS * BLOCK_SIZE) + group * BLOCK_SIZE + inside
                scores *= tl.load(k_scales + scales_at, mask=readable, other=0.0)[None, :]
            if SOFT_CAPPED:
                scores = 1.0 - 2.0 / (tl.math.exp2(scores * inner) + 1.0)  # tanh
            if SCALED:
                # Scales of V may be too small for float16: their powers of 2 are added to the scores.
                exponent, inverse, rest = _split_scales(tl.load(v_scales + scales_at, mask=readable, other=0.0))
                scores = tl.math.fma(scores, factor, exponent[None, :])
            else:
                scores *= factor
            seen = readable[None, :]
            if QUERIES > 1:
                seen &= keys[None, :] <= positions[:, None]
                if WINDOWED:
                    seen &= keys[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, -float("inf"))
            new = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.math.exp2(scores - new[:, None])
            shrink = tl.math.exp2(largest - new)[:, None]
            largest = new
            if SCALED:
                totals = tl.math.fma(weights, inverse[None, :], totals * shrink)
                weights *= rest[None, :]
            else:
                totals = tl.math.fma(totals, shrink, weights)
            v_rows = tl.load(v + places, mask=in_pool, other=0)
            if PACKED:
                v_low, v_high = decode_pair(v_rows, INT8, NATIVE)
                values = multiply(weights.to(operand), v_low, values * shrink)
                values_high = multiply(weights.to(operand), v_high, values_high * shrink)
            else:
                values = multiply(weights.to(operand), v_rows, values * shrink)
            # The blocks of the next tile are looked up now, so that its keys needn't wait for them.
            following = tl.minimum(start + TILE, (end - 1) // TILE * TILE)
            blocks = _find_blocks(table, following, first_key, end, BLOCK_SIZE, TILE, WINDOWED)
        if PACKED:
            values = tl.interleave(values, values_high)
        total = tl.sum(totals, 1)

        columns = tl.arange(0, values.shape[1])
        mask = exists[:, None] & (columns < HEAD_DIM)[None, :]
        places = rows * (GROUPS * REPEATS) + heads
        if count == 1:
            result = values / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(out + (places * HEAD_DIM)[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=mask)
        else:
            places = places * max_splits + split
            num_places = num_sequences.to(tl.int64) * (QUERIES * GROUPS * REPEATS) * max_splits
            tl.store(workspace + (places * HEAD_DIM)[:, None] + columns[None, :], values, mask=mask)
            states = workspace + num_places * HEAD_DIM + places
            tl.store(states, largest, mask=exists)
            tl.store(states + num_places, total, mask=exists)


@triton.jit(do_not_specialize=["max_splits", "window"])
def _combine(
    workspace, context_lens, out, max_splits, window,
    QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr, MERGED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Programs (row, head): the merged state of those in `workspace`, if there are several."""
    row, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + row // QUERIES)
    _, _, _, count = _splits_of(context, window, QUERIES, SPLIT, MOST_SPLITS, WINDOWED)
    if count == 1:
        return
    num_rows, num_heads = tl.num_programs(0), tl.num_programs(1)
    num_places = num_rows.to(tl.int64) * num_heads * max_splits
    place = row.to(tl.int64) * num_heads + head
    states = workspace + num_places * HEAD_DIM + place * max_splits
    splits = tl.arange(0, PADDED_SPLITS)
    largest = tl.load(states + splits, mask=splits < count, other=NOTHING)
    totals = tl.load(states + num_places + splits, mask=splits < count, other=0.0)
    new = tl.max(largest, 0)
    total = tl.sum(totals * tl.math.exp2(largest - new), 0)
    columns = tl.arange(0, WIDTH)
    values = tl.zeros([WIDTH], tl.float32)
    for start in tl.range(0, count, MERGED):
        some = start + tl.arange(0, MERGED)
        shrink = tl.math.exp2(tl.load(states + some, mask=some < count, other=NOTHING) - new)
        pointers = workspace + ((place * max_splits + some) * HEAD_DIM)[:, None] + columns[None, :]
        mask = (some < count)[:, None] & (columns < HEAD_DIM)[None, :]
        values += tl.sum(tl.load(pointers, mask=mask, other=0.0) * shrink[:, None], 0)
    result = values / tl.where(total == 0, 1.0, total)
    tl.store(out + place * HEAD_DIM + columns, result.to(out.dtype.element_ty), mask=columns < HEAD_DIM)
