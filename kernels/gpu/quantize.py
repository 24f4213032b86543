"""Rows of activations as 8-bit numbers, each row with a float32 scale: the inputs of W8A8 linears.

scale = largest magnitude of the row / largest number of the dtype (127, 448), and value = code * scale, rounded to the
nearest code. A row of zeros has scale 0. A row with a NaN has scale NaN, one with an infinity has scale infinity: what
is computed from them shows it, although int8 codes can't.

Norms and activations that quantize give the same codes and scales as `quantize_rows` of what they would give without.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.numbers import as_bytes, encode_e4m3, encode_int8, largest_of, native_e4m3
from kernels.gpu.tables import choose


def row_block(width: int, largest: int) -> int:
    """BLOCK of kernels that treat a row of `width` elements in one program: all of it, or `largest` at a time."""
    return min(triton.next_power_of_2(width), largest)


def codes_and_scales(
    like: torch.Tensor, width: int, dtype: torch.dtype, codes: torch.Tensor | None, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a row kernel writes: `codes` [T, width] and `scales` [T], made beside `like` [T, ...] if not given."""
    if codes is None:
        codes = like.new_empty((like.shape[0], width), dtype=dtype)
    if scales is None:
        scales = like.new_empty((like.shape[0],), dtype=torch.float32)
    return codes, scales


@triton.jit
def magnitude(x):
    """|x| of float32 as the bits of an int32, which are in the same order, and in which a NaN is above all numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(magnitudes, LARGEST: tl.constexpr):
    """(scale, what to multiply values with for their codes) of the last axis of `magnitude(x)`."""
    largest = tl.max(magnitudes, axis=len(magnitudes.shape) - 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, LARGEST)
    # The inverse of less than the smallest normal number can be infinite: such rows are zeros.
    return scale, tl.where(scale < 1.1754943508222875e-38, 0.0, tl.div_rn(1.0, scale))


@triton.jit
def encode(x, inverse, INT8: tl.constexpr, NATIVE: tl.constexpr):
    """Codes of float32 values, as int8 or as the bytes of e4m3; `inverse` is that of `scale_of`."""
    if INT8:
        return encode_int8(x * inverse)
    else:
        return encode_e4m3(x * inverse, NATIVE)


@triton.jit
def _quantize(
    x,
    codes,
    scales,
    x_row,
    codes_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    codes += row * codes_row
    INT8: tl.constexpr = codes.dtype.element_ty == tl.int8
    at = tl.arange(0, BLOCK)
    if BLOCK >= WIDTH:
        value = tl.load(x + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        scale, inverse = scale_of(magnitude(value), LARGEST)
        tl.store(codes + at, encode(value, inverse, INT8, NATIVE), mask=at < WIDTH)
    else:
        largest = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, WIDTH, BLOCK):
            value = tl.load(x + start + at, mask=start + at < WIDTH, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, magnitude(value))
        scale, inverse = scale_of(largest, LARGEST)
        for start in range(0, WIDTH, BLOCK):
            value = tl.load(x + start + at, mask=start + at < WIDTH, other=0.0).to(tl.float32)
            tl.store(codes + start + at, encode(value, inverse, INT8, NATIVE), mask=start + at < WIDTH)
    tl.store(scales + row, scale)


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, *, codes: torch.Tensor | None = None, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (codes [T, K] of `dtype`, int8 or float8_e4m3fn; scales [T] float32).

    For linears whose input no norm or activation makes. The elements of a row are adjacent, rows may be apart.
    """
    codes, scales = codes_and_scales(x, x.shape[1], dtype, codes, scales)
    settings = choose("quantize_rows", width=x.shape[1])
    launch(
        _quantize,
        (x.shape[0],),
        x,
        as_bytes(codes),
        scales,
        x.stride(0),
        codes.stride(0),
        WIDTH=x.shape[1],
        BLOCK=row_block(x.shape[1], settings["BLOCK"]),
        LARGEST=largest_of(dtype),
        NATIVE=native_e4m3(),
        num_warps=settings["num_warps"],
        fp_fusion=False,
    )
    return codes, scales
