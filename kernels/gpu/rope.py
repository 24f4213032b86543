"""Rotary position embedding (Su et al. 2021) of queries and keys, and the write of keys and values to the KV pool.

Halves layout: in a head, i pairs with i + D / 2. Rotation is in float32, and its products and sums are not fused, as
the CPU backend's aren't. In a pool of 8-bit numbers each head of each token has its own scale, largest magnitude /
largest number of the dtype: 0 for zeros, NaN where there is a NaN, infinity where there is an infinity.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import cdiv, launch
from kernels.gpu.numbers import as_bytes, largest_of, native_e4m3
from kernels.gpu.quantize import encode, magnitude, scale_of
from kernels.gpu.tables import choose


@triton.jit
def _halves(heads, places, inside, half: tl.constexpr):
    """Both halves of the heads at `places`, in float32 and 0 outside."""
    first = tl.load(heads + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + half + places, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _rotated(first, second, cos, sin, at, half: tl.constexpr):
    """`cos` and `sin` point to those of the token.

    They wait for its position, so the heads are loaded before them, and they are both loaded before one is used.
    """
    c = tl.load(cos + at, mask=at < half, other=0.0)
    s = tl.load(sin + at, mask=at < half, other=0.0)
    c = c[None, :]
    s = s[None, :]
    return first * c - second * s, second * c + first * s


@triton.jit
def _write_queries(
    q, q_out, cos, sin, part, at, HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, half: tl.constexpr
):
    """Rotate the heads of tile `part` of one token."""
    heads = part * TILE + tl.arange(0, TILE)
    places = heads[:, None] * HEAD_DIM + at[None, :]
    inside = (heads < HEADS)[:, None] & (at < half)[None, :]
    first, second = _halves(q, places, inside, half)
    first, second = _rotated(first, second, cos, sin, at, half)
    tl.store(q_out + places, first, mask=inside)
    tl.store(q_out + half + places, second, mask=inside)


@triton.jit
def _write_to_pool(
    pool,
    scales,
    first,
    second,
    places,
    inside,
    scale_places,
    scale_inside,
    half: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store both halves of some heads of one token, and their scales where the pool has 8-bit numbers."""
    if scales is not None:
        INT8: tl.constexpr = pool.dtype.element_ty == tl.int8
        scale, inverse = scale_of(tl.maximum(magnitude(first), magnitude(second)), LARGEST)
        tl.store(scales + scale_places, scale, mask=scale_inside)
        first = encode(first, inverse[:, None], INT8, NATIVE)
        second = encode(second, inverse[:, None], INT8, NATIVE)
    tl.store(pool + places, first, mask=inside)
    tl.store(pool + half + places, second, mask=inside)


@triton.jit
def _rope_and_write(
    qkv,
    positions,
    slots,
    cos,
    sin,
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    q_out,
    qkv_row,
    q_row,
    pool_block,
    pool_head,
    pool_offset,
    scale_block,
    scale_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # HEAD_DIM / 2 or the next power of two
    Q_TILE: tl.constexpr,  # query heads of a program
    KV_TILE: tl.constexpr,  # key heads, and as many value heads, of a program
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    half: tl.constexpr = HEAD_DIM // 2
    q_programs: tl.constexpr = (HEADS + Q_TILE - 1) // Q_TILE
    programs: tl.constexpr = q_programs + (KV_HEADS + KV_TILE - 1) // KV_TILE
    token = (tl.program_id(0) // programs).to(tl.int64)
    part = tl.program_id(0) % programs
    at = tl.arange(0, HALF)
    position = tl.load(positions + token)
    cos += position * half
    sin += position * half
    qkv += token * qkv_row
    if part < q_programs:
        _write_queries(qkv, q_out + token * q_row, cos, sin, part, at, HEADS, Q_TILE, HEAD_DIM, half)
    else:
        slot = tl.load(slots + token)
        heads = (part - q_programs) * KV_TILE + tl.arange(0, KV_TILE)
        here = heads < tl.where(slot >= 0, KV_HEADS, 0)
        places = heads[:, None] * HEAD_DIM + at[None, :]
        inside = here[:, None] & (at < half)[None, :]
        k_first, k_second = _halves(qkv + HEADS * HEAD_DIM, places, inside, half)
        v_first, v_second = _halves(qkv + (HEADS + KV_HEADS) * HEAD_DIM, places, inside, half)
        k_first, k_second = _rotated(k_first, k_second, cos, sin, at, half)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        head_places = block * pool_block + heads.to(tl.int64) * pool_head + offset * pool_offset
        places = head_places[:, None] + at[None, :]
        scale_places = block * scale_block + heads.to(tl.int64) * scale_head + offset
        _write_to_pool(k_pool, k_scales, k_first, k_second, places, inside, scale_places, here, half, LARGEST, NATIVE)
        _write_to_pool(v_pool, v_scales, v_first, v_second, places, inside, scale_places, here, half, LARGEST, NATIVE)


def rope_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    num_heads: int,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate q and k by position, write k and v into the pools, and return q [T, H, D] in the dtype of `qkv`.

    `qkv` [T, (H + 2 G) D] has the query, key and value heads in that order; its rows may be apart. `positions` [T]
    int64; `slots` [T] int64, block id * block size + offset. A token of negative slot fills up a CUDA graph: nothing of
    it goes to the pools, but its q is rotated, so its position must be one. `cos` and `sin` [positions, D / 2] float32.

    The pools [blocks, G, block size, D] are float32, bfloat16, float16, float8_e4m3fn or int8, the last two with scales
    [blocks, G, block size] float32. Both pools have the same strides, of which the last is 1, and so have both scales.
    `q_out` [T, H, D] may have rows apart.
    """
    tokens = qkv.shape[0]
    _, kv_heads, block_size, head_dim = k_pool.shape
    if q_out is None:
        q_out = qkv.new_empty((tokens, num_heads, head_dim))
    settings = choose("rope_and_write", heads=num_heads, kv_heads=kv_heads, head_dim=head_dim)
    q_tile = min(triton.next_power_of_2(num_heads), settings["HEADS"])
    kv_tile = min(triton.next_power_of_2(kv_heads), max(settings["HEADS"] // 2, 1))
    launch(
        _rope_and_write,
        (tokens * (cdiv(num_heads, q_tile) + cdiv(kv_heads, kv_tile)),),
        qkv,
        positions,
        slots,
        cos,
        sin,
        as_bytes(k_pool),
        as_bytes(v_pool),
        k_scales,
        v_scales,
        q_out,
        qkv.stride(0),
        q_out.stride(0),
        *k_pool.stride()[:3],
        *(k_scales.stride()[:2] if k_scales is not None else (0, 0)),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HALF=triton.next_power_of_2(head_dim // 2),
        Q_TILE=q_tile,
        KV_TILE=kv_tile,
        LARGEST=largest_of(k_pool.dtype),
        NATIVE=native_e4m3(),
        num_warps=settings["num_warps"],
        fp_fusion=False,
    )
    return q_out
