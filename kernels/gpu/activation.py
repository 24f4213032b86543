"""Activations of MLPs, with the bias before them, the product of gated MLPs, and the quantization after it.

Every intermediate result is rounded as if a linear, an activation and a product were apart, in float32 inside: x + bias
to the dtype of the output, so are the activation and then the product. Products and sums are not fused, so that a row
has the same bits with and without quantization. The elements of a row are adjacent, rows may be apart.

Kinds: "silu" (Elfwing et al. 2018), "gelu" (Hendrycks & Gimpel 2016, the tanh form) and "none".
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import cdiv, launch
from kernels.gpu.numbers import as_bytes, largest_of, native_e4m3
from kernels.gpu.quantize import codes_and_scales, encode, magnitude, row_block, scale_of
from kernels.gpu.tables import choose

_KINDS = ("silu", "gelu", "none")


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """float32 -> float32."""
    if KIND == "none":
        return x
    elif KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    else:
        # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)); 2 sqrt(2 / pi) = 1.5957...
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * (x * x * x))))


@triton.jit
def _with_bias(x, bias, at, inside, dtype: tl.constexpr):
    """x + bias at `at`, rounded to `dtype`, in float32; 0 outside."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return value.to(dtype).to(tl.float32)


@triton.jit
def _gated(gate_up, bias, at, inside, WIDTH: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """act(gate) * up at `at`, rounded to `dtype`, in float32; 0 outside."""
    gate = _with_bias(gate_up, bias, at, inside, dtype)
    up = _with_bias(gate_up, bias, WIDTH + at, inside, dtype)
    activated = _activated(gate, KIND).to(dtype).to(tl.float32)
    return (activated * up).to(dtype).to(tl.float32)


@triton.jit
def _elementwise(
    x,
    bias,
    out,
    x_row,
    out_row,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    x += row * x_row
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        value = _gated(x, bias, at, inside, WIDTH, KIND, dtype)
    else:
        value = _activated(_with_bias(x, bias, at, inside, dtype), KIND)
    tl.store(out + row * out_row + at, value, mask=inside)


@triton.jit
def _gated_quantized(
    gate_up,
    bias,
    codes,
    scales,
    gate_up_row,
    codes_row,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate_up += row * gate_up_row
    codes += row * codes_row
    INT8: tl.constexpr = codes.dtype.element_ty == tl.int8
    dtype: tl.constexpr = gate_up.dtype.element_ty
    at = tl.arange(0, BLOCK)
    if BLOCK >= WIDTH:
        value = _gated(gate_up, bias, at, at < WIDTH, WIDTH, KIND, dtype)
        scale, inverse = scale_of(magnitude(value), LARGEST)
        tl.store(codes + at, encode(value, inverse, INT8, NATIVE), mask=at < WIDTH)
    else:
        largest = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, WIDTH, BLOCK):
            value = _gated(gate_up, bias, start + at, start + at < WIDTH, WIDTH, KIND, dtype)
            largest = tl.maximum(largest, magnitude(value))
        scale, inverse = scale_of(largest, LARGEST)
        for start in range(0, WIDTH, BLOCK):
            inside = start + at < WIDTH
            value = _gated(gate_up, bias, start + at, inside, WIDTH, KIND, dtype)
            tl.store(codes + start + at, encode(value, inverse, INT8, NATIVE), mask=inside)
    tl.store(scales + row, scale)


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        raise ValueError(f"activation {kind!r} is not one of {', '.join(_KINDS)}")


def _launch_elementwise(
    kernel: str, x: torch.Tensor, bias: torch.Tensor | None, kind: str, out: torch.Tensor, gated: bool
) -> None:
    tokens, width = out.shape
    settings = choose(kernel, width=width)
    launch(
        _elementwise,
        (tokens * cdiv(width, settings["BLOCK"]),),
        x,
        bias,
        out,
        x.stride(0),
        out.stride(0),
        WIDTH=width,
        KIND=kind,
        GATED=gated,
        BLOCK=settings["BLOCK"],
        num_warps=settings["num_warps"],
        fp_fusion=False,
    )


def bias_activation(
    x: torch.Tensor, bias: torch.Tensor | None, kind: str, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """act(x [T, N] + bias [N]) -> [T, N], in the dtype of x unless `out` has another. `out` may be x.

    Raises ValueError when there is no such kind of activation.
    """
    _check_kind(kind)
    if out is None:
        out = torch.empty_like(x)
    _launch_elementwise("bias_activation", x, bias, kind, out, gated=False)
    return out


def gated_activation(
    gate_up: torch.Tensor, kind: str, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """gate_up [T, 2 I], bias [2 I] -> act(gate) * up [T, I], in the dtype of gate_up unless `out` has another.

    The gate is the first half of the columns. Raises ValueError when there is no such kind of activation.
    """
    _check_kind(kind)
    if out is None:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    _launch_elementwise("gated_activation", gate_up, bias, kind, out, gated=True)
    return out


def gated_activation_quantized(
    gate_up: torch.Tensor,
    kind: str,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_rows(gated_activation(gate_up)): (codes [T, I] of `dtype`, int8 or float8_e4m3fn; scales [T] float32).

    Raises ValueError when there is no such kind of activation.
    """
    _check_kind(kind)
    width = gate_up.shape[1] // 2
    codes, scales = codes_and_scales(gate_up, width, dtype, codes, scales)
    settings = choose("gated_activation_quantized", width=width)
    launch(
        _gated_quantized,
        (gate_up.shape[0],),
        gate_up,
        bias,
        as_bytes(codes),
        scales,
        gate_up.stride(0),
        codes.stride(0),
        WIDTH=width,
        KIND=kind,
        BLOCK=row_block(width, settings["BLOCK"]),
        LARGEST=largest_of(dtype),
        NATIVE=native_e4m3(),
        num_warps=settings["num_warps"],
        fp_fusion=False,
    )
    return codes, scales
