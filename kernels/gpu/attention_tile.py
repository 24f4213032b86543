"""What the attention kernels share: key tiles from a paged pool, scores, masks, and the softmax over them.

A program has M query rows, of one sequence and one KV head, and walks over tiles of TILE key positions counted from
position 0. Each row keeps a state, from which its output is values / total (Milakov & Gimelshein 2018, "Online
normalizer calculation for softmax"; Dao 2023, "FlashAttention-2"):

    largest [M]       float32, the largest score so far, in units of log2; NOTHING before the first
    total   [M]       float32, the sum of exp2(score - largest)
    values  [M, D']   float32, the sum of exp2(score - largest) * V; D' is D rounded up to a power of 2

A tile in which a row sees no key leaves its state as it was, bit for bit. A position that no row of the program may see
is not read: the pool may hold anything there, and the block table anything for it.

Sums of products are spelled out for kernels compiled without fusion (`launch(..., fp_fusion=False)`), so that a row has
the same bits in every kernel and on every path through one.
"""

import math

import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED
from kernels.gpu.numbers import decode_e4m3

_INTERPRETED = tl.constexpr(INTERPRETED)

# Of the dimension of heads.
HEAD_STEP, LARGEST_HEAD = 16, 256

NOTHING: tl.constexpr = tl.constexpr(-1e30)  # finite, so that a difference of two is not NaN


def score_factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """(factor, inner) of the functions below, for scores q.k * scale, if soft_cap: soft_cap * tanh(that / soft_cap).

    A score in units of log2 is q.k * factor, or tanh(q.k * inner / (2 log2(e))) * factor. `scale` must be above 0.
    """
    log2_e = math.log2(math.e)
    return (soft_cap * log2_e, 2 * log2_e * scale / soft_cap) if soft_cap else (scale * log2_e, 0.0)


@triton.jit
def multiply(a, b, addend):
    """a @ b + addend in float32; what the interpreter multiplies with has no bfloat16."""
    if _INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), addend, input_precision="ieee")
    return tl.dot(a, b, addend, input_precision="ieee")


@triton.jit
def empty_state(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(largest, total, values) before the first key."""
    largest = tl.full([ROWS], NOTHING, tl.float32)
    return largest, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def merge(largest, total, values, more_largest, more_total, more_values):
    """The state after the keys of two states. Merging with an empty one changes nothing."""
    new = tl.maximum(largest, more_largest)
    shrink = tl.math.exp2(largest - new)
    more_shrink = tl.math.exp2(more_largest - new)
    total = total * shrink + more_total * more_shrink
    values = values * tl.expand_dims(shrink, -1) + more_values * tl.expand_dims(more_shrink, -1)
    return new, total, values


@triton.jit
def attend(
    q,  # [M, D'], the columns from D on are zero
    positions,  # [M] int32
    first_position,  # the least of `positions`
    last_position,  # and the largest
    begin,  # keys; a multiple of TILE
    end,  # a multiple of TILE, or beyond last_position
    table,  # pointer to the sequence's row of the block table
    k,  # pointer to the KV head's part of block 0, [block_size, D]; e4m3 as uint8
    v,
    k_scales,  # pointer to the KV head's part of block 0, [block_size] float32; None unless SCALED
    v_scales,
    block_stride,  # between blocks of `k` and of `v`, in units of 16 elements
    scale_stride,  # between blocks of the scales, in elements
    window,  # with WINDOWED: a query sees the last `window` positions up to its own
    factor,  # see `score_factors`
    inner,
    HEAD_DIM: tl.constexpr,  # D, a multiple of 16
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    NATIVE: tl.constexpr,  # `native_e4m3()`
):
    """(largest, total, values) of the rows over those of the keys begin..end - 1 that each of them sees.

    Only tiles that a row sees in part are masked.
    """
    first_key = begin
    if WINDOWED:
        first_key = tl.maximum(first_position - window + 1, begin)
    last_key = tl.minimum(last_position, end - 1)
    first_tile = first_key // TILE * TILE
    # All rows see all keys of the tiles from all_from up to all_to.
    all_from = first_tile
    if WINDOWED:
        all_from = (tl.maximum(last_position - window, -1) + TILE) // TILE * TILE
        all_from = tl.minimum(tl.maximum(all_from, first_tile), last_key + 1)
    all_to = tl.minimum(tl.maximum((first_position + 1) // TILE * TILE, all_from), last_key + 1)
    largest, total, values = empty_state(q.shape[0], q.shape[1])
    if WINDOWED:
        largest, total, values = _attend_tiles(
            largest, total, values, q, positions, first_tile, all_from, first_key, last_key, table, k, v, k_scales,
            v_scales, block_stride, scale_stride, window, factor, inner, HEAD_DIM, BLOCK_SIZE, TILE, SCALED,
            SOFT_CAPPED, WINDOWED, NATIVE, True,
        )  # fmt: skip
    largest, total, values = _attend_tiles(
        largest, total, values, q, positions, all_from, all_to, first_key, last_key, table, k, v, k_scales, v_scales,
        block_stride, scale_stride, window, factor, inner, HEAD_DIM, BLOCK_SIZE, TILE, SCALED, SOFT_CAPPED, WINDOWED,
        NATIVE, False,
    )  # fmt: skip
    return _attend_tiles(
        largest, total, values, q, positions, all_to, last_key + 1, first_key, last_key, table, k, v, k_scales,
        v_scales, block_stride, scale_stride, window, factor, inner, HEAD_DIM, BLOCK_SIZE, TILE, SCALED, SOFT_CAPPED,
        WINDOWED, NATIVE, True,
    )  # fmt: skip


@triton.jit
def _attend_tiles(
    largest, total, values, q, positions, begin, end, first_key, last_key, table, k, v, k_scales, v_scales,
    block_stride, scale_stride, window, factor, inner, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SCALED: tl.constexpr, SOFT_CAPPED: tl.constexpr, WINDOWED: tl.constexpr, NATIVE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """See `attend`: the tiles at begin, begin + TILE, ... below `end`, of which first_key..last_key may be read.

    The blocks of a tile are looked up one tile ahead. So no load in the loop waits for another one, and the compiler
    can have the keys of `num_stages` tiles on their way.
    """
    following = _find_blocks(table, begin, first_key, last_key, BLOCK_SIZE, TILE, True)
    for start in tl.range(begin, end, TILE):
        blocks = following
        ahead = start + TILE if MASKED else tl.minimum(start + TILE, end - TILE)
        following = _find_blocks(table, ahead, first_key, last_key, BLOCK_SIZE, TILE, MASKED)
        keys = start + tl.arange(0, TILE)
        readable = (keys >= first_key) & (keys <= last_key)
        places = _places(blocks, start, block_stride, HEAD_DIM // 16, BLOCK_SIZE, TILE)
        rows = _load_rows(k, places, readable, HEAD_DIM, q.shape[1], q.dtype, NATIVE, MASKED)
        scores = multiply(q, tl.trans(rows), None)
        if SCALED:
            scale_places = _places(blocks, start, scale_stride, 1, BLOCK_SIZE, TILE)
            scores *= _load_scales(k_scales, scale_places, readable, MASKED)[None, :]
        if SOFT_CAPPED:
            scores = 1.0 - 2.0 / (tl.math.exp2(scores * inner) + 1.0)  # tanh
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOWED:
                seen &= keys[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1) * factor)
        weights = tl.math.exp2(tl.math.fma(scores, factor, -new[:, None]))
        shrink = tl.math.exp2(largest - new)
        total = tl.math.fma(total, shrink, tl.sum(weights, 1))
        largest = new
        if SCALED:
            weights *= _load_scales(v_scales, scale_places, readable, MASKED)[None, :]
        # Weights times the scales of V may be too small for float16; bfloat16 holds 8-bit numbers exactly.
        dtype: tl.constexpr = tl.bfloat16 if SCALED and q.dtype == tl.float16 else q.dtype
        rows = _load_rows(v, places, readable, HEAD_DIM, q.shape[1], dtype, NATIVE, MASKED)
        values = multiply(weights.to(dtype), rows, values * shrink[:, None])
    return largest, total, values


@triton.jit
def _find_blocks(
    table, start, first_key, last_key, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The blocks of the tile at `start`, a multiple of TILE: [TILE], or one number where no tile crosses blocks."""
    if BLOCK_SIZE % TILE == 0:
        blocks = tl.load(table + tl.maximum(tl.minimum(start, last_key), 0) // BLOCK_SIZE)
    else:
        offsets = tl.arange(0, TILE)
        if TILE % BLOCK_SIZE == 0:
            entries = table + start // BLOCK_SIZE + offsets // BLOCK_SIZE
        else:
            entries = table + (start + offsets) // BLOCK_SIZE
        if MASKED:
            readable = (start + offsets >= first_key) & (start + offsets <= last_key)
            blocks = tl.load(entries, mask=readable, other=0)
        else:
            blocks = tl.load(entries)
    return blocks


@triton.jit
def _places(blocks, start, stride, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """[TILE] int32: block * stride + offset in the block * ROW, of the keys of the tile at `start`."""
    offsets = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        inside = start % BLOCK_SIZE + offsets
    elif TILE % BLOCK_SIZE == 0:
        inside = offsets % BLOCK_SIZE  # the same in all tiles
    else:
        inside = (start + offsets) % BLOCK_SIZE
    return blocks * stride + inside * ROW


@triton.jit
def _load_rows(
    pool, places, readable, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """K or V at `places`, in units of 16 elements: [TILE, WIDTH] in DTYPE, codes not scaled.

    Columns from HEAD_DIM on are 0, and with MASKED the rows that are not readable.
    """
    columns = tl.arange(0, WIDTH)
    pointers = (pool + columns)[None, :] + (places.to(tl.int64) * 16)[:, None]
    if MASKED and WIDTH != HEAD_DIM:
        rows = tl.load(pointers, mask=readable[:, None] & (columns < HEAD_DIM)[None, :], other=0)
    elif MASKED:
        rows = tl.load(pointers, mask=readable[:, None], other=0)
    elif WIDTH != HEAD_DIM:
        rows = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0)
    else:
        rows = tl.load(pointers)
    # By way of float32, since the interpreter converts nothing else to bfloat16.
    if rows.dtype == tl.uint8:
        return decode_e4m3(rows, NATIVE).to(tl.float32).to(DTYPE)
    if rows.dtype == tl.int8:
        return rows.to(tl.float32).to(DTYPE)
    return rows.to(DTYPE)


@triton.jit
def _load_scales(scales, places, readable, MASKED: tl.constexpr):
    """[TILE]; with MASKED 0 where `readable` is not."""
    return tl.load(scales + places, mask=readable, other=0.0) if MASKED else tl.load(scales + places)
