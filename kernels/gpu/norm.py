"""RMSNorm (Zhang & Sennrich 2019), with the sum with the residual before it and the quantization after it.

A row is one program, whose block and warps depend on the row's width alone, so its sum of squares is added in the same
order whatever the other rows are: this is the norm of `--deterministic`, too. All variants of a width have the same
settings, and products and sums are not fused, so that a row has the same bits with and without quantization.

Sums are in float32. What the weight is multiplied with is rounded to the weight's dtype before, and the product after,
as bfloat16 models are trained and published. The elements of a row are adjacent, rows may be apart.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.numbers import as_bytes, largest_of, native_e4m3
from kernels.gpu.quantize import codes_and_scales, encode, magnitude, row_block, scale_of
from kernels.gpu.tables import choose


@triton.jit
def _total(x, residual, total, at, inside):
    """x, or x + residual rounded to the dtype of `total`; in float32, and 0 outside."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _weighted(value, factor, weight):
    """value * factor * weight, in float32 but rounded to the dtype of the weight."""
    normed = (value * factor).to(weight.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)


@triton.jit
def _norm(
    x,
    residual,
    weight,
    total,
    out,
    scales,
    x_row,
    residual_row,
    total_row,
    out_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    out += row * out_row
    if residual is not None:
        residual += row * residual_row
        total += row * total_row
    INT8: tl.constexpr = out.dtype.element_ty == tl.int8
    at = tl.arange(0, BLOCK)
    if BLOCK >= WIDTH:
        inside = at < WIDTH
        value = _total(x, residual, total, at, inside)
        row_weight = tl.load(weight + at, mask=inside, other=0.0)  # so that it doesn't wait for the sum
        factor = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
        if residual is not None:
            # Where the total replaces the residual: all threads have read theirs, since the sum is there.
            tl.store(total + at, value, mask=inside)
        normed = _weighted(value, factor, row_weight)
        if scales is None:
            tl.store(out + at, normed, mask=inside)
        else:
            scale, inverse = scale_of(magnitude(normed), LARGEST)
            tl.store(scales + row, scale)
            tl.store(out + at, encode(normed, inverse, INT8, NATIVE), mask=inside)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            inside = start + at < WIDTH
            value = _total(x, residual, total, start + at, inside)
            squares += value * value
            if residual is not None:
                tl.store(total + start + at, value, mask=inside)
        factor = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
        if residual is None:
            source = x
        else:
            source = total
            tl.debug_barrier()  # other threads may read what this one has written
        largest = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, WIDTH, BLOCK):
            inside = start + at < WIDTH
            value = tl.load(source + start + at, mask=inside, other=0.0).to(tl.float32)
            normed = _weighted(value, factor, tl.load(weight + start + at, mask=inside, other=0.0))
            if scales is None:
                tl.store(out + start + at, normed, mask=inside)
            else:
                largest = tl.maximum(largest, magnitude(normed))
        if scales is not None:
            scale, inverse = scale_of(largest, LARGEST)
            tl.store(scales + row, scale)
            for start in range(0, WIDTH, BLOCK):
                inside = start + at < WIDTH
                value = tl.load(source + start + at, mask=inside, other=0.0).to(tl.float32)
                normed = _weighted(value, factor, tl.load(weight + start + at, mask=inside, other=0.0))
                tl.store(out + start + at, encode(normed, inverse, INT8, NATIVE), mask=inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    tokens, width = x.shape
    settings = choose("rms_norm", hidden=width)
    launch(
        _norm,
        (tokens,),
        x,
        residual,
        weight,
        total,
        as_bytes(out),
        scales,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        0 if total is None else total.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        BLOCK=row_block(width, settings["BLOCK"]),
        LARGEST=largest_of(out.dtype),
        NATIVE=native_e4m3(),
        num_warps=settings["num_warps"],
        fp_fusion=False,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [K] -> [T, K] in the dtype of the weight. `out` may be x."""
    if out is None:
        out = torch.empty_like(x, dtype=weight.dtype)
    _launch(x, None, weight, eps, None, out, None)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(total), total = x + residual), all [T, K]; `total` is in the dtype of the residual, and may be it.

    x may be float32, as sums over ranks are, beside a bfloat16 residual: their sum is rounded once. The norm is that of
    the rounded total. `out` may be x.
    """
    if out is None:
        out = torch.empty_like(residual, dtype=weight.dtype)
    if total is None:
        total = torch.empty_like(residual)
    _launch(x, residual, weight, eps, total, out, None)
    return out, total


def rms_norm_quantized(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_rows(rms_norm(x)): (codes [T, K] of `dtype`, int8 or float8_e4m3fn; scales [T] float32)."""
    codes, scales = codes_and_scales(x, x.shape[1], dtype, codes, scales)
    _launch(x, None, weight, eps, None, codes, scales)
    return codes, scales


def add_rms_norm_quantized(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """quantize_rows(add_rms_norm(x, residual)): (codes [T, K], scales [T], total [T, K])."""
    codes, scales = codes_and_scales(x, x.shape[1], dtype, codes, scales)
    if total is None:
        total = torch.empty_like(residual)
    _launch(x, residual, weight, eps, total, codes, scales)
    return codes, scales, total
