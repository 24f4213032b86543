"""8-bit numbers in kernels: int8 and float8 e4m3 (Micikevicius et al. 2022, "FP8 formats for deep learning").

Kernels are given float8 tensors as bytes. Devices from sm_89 on convert them in hardware; elsewhere it is done with
integers, to the same values (gfx942 has a format of its own).
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, architecture

E4M3_LARGEST = 448.0
INT8_LARGEST = 127.0

_NATIVE_E4M3 = ("sm_90", "sm_100")  # sm_86 stands for cards with and without


def native_e4m3() -> bool:
    """Whether the current device converts e4m3: the constexpr `NATIVE` of the functions below."""
    return not INTERPRETED and architecture() in _NATIVE_E4M3


def native_pairs(dtype: torch.dtype) -> bool:
    """Whether the current device has instructions for `decode_pair` of an 8-bit `dtype`: its constexpr `NATIVE`."""
    if dtype == torch.int8:
        return not INTERPRETED and architecture().startswith("sm_")
    return native_e4m3()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """What a kernel is given of `x`: a float8 tensor as uint8, others as they are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def largest_of(dtype: torch.dtype) -> float:
    """The largest number of an 8-bit `dtype` that values are scaled to."""
    return INT8_LARGEST if dtype == torch.int8 else E4M3_LARGEST


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """uint8 -> float16, exactly; without NATIVE a NaN becomes 480, so the scale beside it has to say so."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    bits = code.to(tl.uint16)
    # Sign, exponent and mantissa at their places in a float16, whose exponent counts from 8 lower.
    placed = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return placed.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def decode_pair(words, INT8: tl.constexpr, NATIVE: tl.constexpr):
    """int16, two codes each, int8 or e4m3 -> (float16 of the low byte, float16 of the high byte), as `decode_e4m3`.

    For V in products on tensor cores, whose operands are loaded and transposed in units of 16 bits, not of 8.
    """
    if INT8:
        # A byte behind 0x64 is the float16 of 1024 more; flipping its top bit adds 128.
        if NATIVE:
            low, high = tl.inline_asm_elementwise(
                """{
                .reg .b32 codes, lows, highs, offset;
                xor.b32 codes, $2, 0x80808080;
                prmt.b32 lows, codes, 0x64646464, 0x4240;
                prmt.b32 highs, codes, 0x64646464, 0x4341;
                mov.b32 offset, 0x64806480;
                sub.rn.f16x2 $0, lows, offset;
                sub.rn.f16x2 $1, highs, offset;
                }""",
                "=r,=r,r",
                [words],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            low = ((words & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
            high = (((words >> 8) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    else:
        if NATIVE:
            low, high = tl.inline_asm_elementwise(
                """{
                .reg .b32 codes;
                .reg .b16 lows, highs;
                prmt.b32 codes, $2, 0, 0x3120;
                mov.b32 {lows, highs}, codes;
                cvt.rn.f16x2.e4m3x2 $0, lows;
                cvt.rn.f16x2.e4m3x2 $1, highs;
                }""",
                "=r,=r,r",
                [words],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            bits = words.to(tl.uint16, bitcast=True)
            low = (((bits << 8) & 0x8000) | ((bits << 7) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
            high = ((bits & 0x8000) | ((bits >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
    return low, high


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """float32 -> uint8: the nearest number, of two the even one; too large becomes the largest, NaN stays NaN."""
    clamped = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if NATIVE:
        code = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = clamped.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # 20 of the 23 bits of the mantissa go; the exponent counts from 120 lower.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        # Below 2^-6 the step is 2^-9: adding 1.5 * 2^14 leaves no room for less in a float32.
        small = (tl.abs(clamped) + 24576.0) - 24576.0
        subnormal = (small * 512.0).to(tl.uint32)
        code = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
        code = code.to(tl.uint8)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def encode_int8(x):
    """float32 -> int8: the nearest integer, of two the even one, within -127..127."""
    clamped = tl.minimum(tl.maximum(x, -127.0), 127.0)
    # Adding 1.5 * 2^23 leaves no room for less than 1 in a float32.
    return ((clamped + 12582912.0) - 12582912.0).to(tl.int8)
