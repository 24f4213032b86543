"""Products of 16-bit activations with 4- and 8-bit integer weights (W4A16, W8A16), and such weights as numbers.

The weights are the left operand, [N, K] times [K, M]: matrix units take it from registers, into which codes are
unpacked, and the activations make as narrow a tile as they need. With M = 1, reading the weights at an H200's bandwidth
is some 35 codes a clock and SM, which issues 128 lanes a clock: a code may cost 3.6. On vector units it costs 3 before
anything is loaded (place, subtract, multiply-add). Here, in bfloat16, two codes share a register: a code costs half a
placing, 3/8 of a shift, half a subtraction and 1/8 of a matrix instruction; the whole loop makes 2.3, counted in SASS.

K is shared in two ways, since a small M leaves too few programs to keep enough reads in flight: SLICES of a program, a
warp each, read consecutive units and are added at the end; SPLIT_K programs leave partial sums, which a second kernel
adds in order. There are no atomics: a run's bits are the next one's.

Where a unit has one scale and BLOCK_M is small, scales multiply the unit's float32 products: BLOCK_M / 128 (4 bits) or
BLOCK_M / 64 multiply-adds for each weight, and what is multiplied before are exact integers. Else they multiply the
weights: 1/2 for each, two being in a register. Zero points are whole numbers and cost nothing, since unpacking
subtracts anyway. Other minimums (GGUF Q4_1) are added to the weights, as the addend of the multiplication by the scale:
sums of activations by group would take another product.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, architecture, cdiv, launch
from kernels.gpu.pack import PackedIntegers, unit_inputs
from kernels.gpu.tables import choose

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_SUM_BLOCK = 256
# With more rows than this the splits are added up in the program instead, in the same order: the partial sums of a long
# prefill would take more memory than its activations.
_MOST_SPLIT_ROWS = 256


@triton.jit
def _field(
    word, SHIFT: tl.constexpr, MASK: tl.constexpr, TOGGLE: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr
):
    """The bits ((word >> SHIFT) & MASK) ^ TOGGLE as numbers; NATIVE does so to the two words of a register at once."""
    if NATIVE:
        bits = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shr.b32 t, $1, {SHIFT}; lop3.b32 $0, t, {MASK * 0x10001}, {TOGGLE * 0x10001}, 0x6a; }}",
            "=r,r",
            [word],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    else:
        bits = ((word.to(tl.uint16, bitcast=True) >> SHIFT) & MASK) ^ TOGGLE
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _codes(
    word,
    zero,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    BFLOAT16: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """code - zero, exactly, in COMPUTE, of part PART of units.

    The bits of a code become the last ones of the mantissa of a number so large that they count ones: 1024 in float16,
    128 in bfloat16. Its mantissa has 7 bits only: the sign of 8-bit codes falls on the exponent and makes 128 or 256,
    which is what has to come off.
    """
    if BITS == 8:
        if BFLOAT16:
            rest = _field(word, 8 * PART, 0x7F, 0x4300, tl.bfloat16, NATIVE).to(COMPUTE)
            code = rest - _field(word, 8 * PART, 0x80, 0x4300, tl.bfloat16, NATIVE).to(COMPUTE)
        else:
            code = _field(word, 8 * PART, 0xFF, 0x6480, tl.float16, NATIVE).to(COMPUTE) - 1152.0
    elif BFLOAT16:
        code = _field(word, 4 * PART, 0xF, 0x4300, tl.bfloat16, NATIVE).to(COMPUTE) - (zero + 128.0)
    else:
        code = _field(word, 4 * PART, 0xF, 0x6400, tl.float16, NATIVE).to(COMPUTE) - (zero + 1024.0)
    return code


@triton.jit
def _of_part(
    word,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    UNIT_GROUPS: tl.constexpr,
    GROUP_DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """[..., rows] words with the numbers of units' groups -> [..., rows, 1]: those for part PART, in COMPUTE."""
    SHIFT: tl.constexpr = PART * BITS * UNIT_GROUPS // 16 * 16
    return tl.expand_dims((word >> SHIFT).to(tl.int16).to(GROUP_DTYPE, bitcast=True).to(COMPUTE), -1)


@triton.jit
def _weights(
    word,
    scale,
    offset,
    PART: tl.constexpr,
    SCALED: tl.constexpr,
    OFFSETS: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    UNIT_GROUPS: tl.constexpr,
    GROUP_DTYPE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Part PART of units as numbers in COMPUTE: code - zero, and if SCALED the values.

    `scale` and `offset`: words for the units' groups; OFFSETS: what the latter has, "zeros", "minimums" or "".
    """
    if OFFSETS == "zeros":
        zero = _of_part(offset, PART, BITS, UNIT_GROUPS, GROUP_DTYPE, COMPUTE)
        weight = _codes(word, zero, PART, BITS, BFLOAT16, COMPUTE, NATIVE)
    else:
        weight = _codes(word, ZERO, PART, BITS, BFLOAT16, COMPUTE, NATIVE)
    if SCALED:
        weight = weight * _of_part(scale, PART, BITS, UNIT_GROUPS, GROUP_DTYPE, COMPUTE)
    if OFFSETS == "minimums":
        weight = weight + _of_part(offset, PART, BITS, UNIT_GROUPS, GROUP_DTYPE, COMPUTE)
    return weight


@triton.jit
def _group_words(scales, offsets, at, OFFSETS: tl.constexpr, UNIT_GROUPS: tl.constexpr):
    """(scale, offset) words; where a word has one scale, its upper half is the offset."""
    scale = tl.load(scales + at)
    offset = scale
    if OFFSETS != "":
        if UNIT_GROUPS == 1:
            offset = scale >> 16
        else:
            offset = tl.load(offsets + at)
    return scale, offset


@triton.jit(do_not_specialize=["num_rows"])
def _matmul(
    x,
    codes,
    scales,
    offsets,
    bias,
    out,
    num_rows,
    n,
    k,
    units,
    padded_n,
    group_stride,
    x_stride,
    out_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    IN_PROGRAM: tl.constexpr,
    EVEN: tl.constexpr,
    BITS: tl.constexpr,
    UNIT_GROUPS: tl.constexpr,
    GROUP_UNITS: tl.constexpr,
    GROUP_DTYPE: tl.constexpr,
    OFFSETS: tl.constexpr,
    ZERO: tl.constexpr,
    BFLOAT16: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """out[m, n] = sum over k of weight[n, k] * x[m, k] (+ bias[n]): one tile, and IN_PROGRAM splits, 1 or all.

    Each split that is not added up here has its own [num_rows, n] in `out`. EVEN: all slices of all splits have as many
    units, and units are full.
    """
    UNIT: tl.constexpr = 512 // BITS
    SCALE_PRODUCTS: tl.constexpr = UNIT_GROUPS == 1 and OFFSETS != "minimums" and BLOCK_M * 4 <= UNIT
    first_row = tl.program_id(0) * BLOCK_N
    first_token = tl.program_id(1) * BLOCK_M
    split = tl.program_id(2)
    if SLICES == 1:
        slices = tl.zeros([1], tl.int32)
        row = tl.arange(0, BLOCK_N)[:, None]
        word_at = tl.arange(0, 32)[None, :]
        input_at = tl.arange(0, 32)[:, None]
        token = tl.arange(0, BLOCK_M)[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        slices = tl.arange(0, SLICES)[:, None]
        row = tl.arange(0, BLOCK_N)[None, :, None]
        word_at = tl.arange(0, 32)[None, None, :]
        input_at = tl.arange(0, 32)[None, :, None]
        token = tl.arange(0, BLOCK_M)[None, None, :]
        total = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    unit_slice = tl.expand_dims(slices, -1)
    # Rows beyond the last block are read as if they were in it, and not written.
    row_block = tl.minimum(row // 16, padded_n // 16 - 1 - first_row // 16)
    word_offsets = (unit_slice + row_block * units) * 512 + row % 16 * 32 + word_at
    words = codes + (first_row // 16).to(tl.int64) * units * 512
    x_offsets = unit_slice * UNIT + token * x_stride + input_at
    x += first_token.to(tl.int64) * x_stride
    live_token = token < num_rows - first_token
    group_rows = tl.arange(0, BLOCK_N) if SLICES == 1 else tl.arange(0, BLOCK_N)[None, :]
    group_rows = tl.minimum(first_row + group_rows, padded_n - 1)

    split_units = tl.cdiv(units, SPLIT_K * SLICES) * SLICES
    for index in range(IN_PROGRAM):
        first_unit = (split + index) * split_units
        products = tl.zeros_like(total)
        if SCALE_PRODUCTS:
            at = tl.minimum(first_unit + slices, units - 1) // GROUP_UNITS * group_stride + group_rows
            next_scale = tl.load(scales + at)
        # At least one step, beyond the last unit if need be: a loop that may be left out costs overlap, since what its
        # sums are then is written between asynchronous products and the wait for them.
        for step in range(tl.maximum(tl.cdiv(tl.minimum(split_units, units - first_unit), SLICES), 1)):
            unit = first_unit + step * SLICES
            at = tl.minimum(unit + slices, units - 1) // GROUP_UNITS * group_stride + group_rows
            scale, offset = _group_words(scales, offsets, at, OFFSETS, UNIT_GROUPS)
            if EVEN:
                word = tl.load(words + (word_offsets + unit * 512))
            else:
                word = tl.load(words + (word_offsets + unit * 512), mask=unit + unit_slice < units, other=0)
            added = tl.zeros_like(total) if SCALE_PRODUCTS else products
            for part in tl.static_range(16 // BITS):
                first_input = unit * UNIT + part * 32
                if EVEN:
                    live = live_token
                else:
                    live = live_token & (first_input + unit_slice * UNIT + input_at < k)
                activation = tl.load(x + (x_offsets + first_input), mask=live, other=0.0).to(COMPUTE)
                weight = _weights(
                    word,
                    scale,
                    offset,
                    part,
                    not SCALE_PRODUCTS,
                    OFFSETS,
                    ZERO,
                    BITS,
                    UNIT_GROUPS,
                    GROUP_DTYPE,
                    BFLOAT16,
                    COMPUTE,
                    NATIVE,
                )
                added = tl.dot(weight, activation, added, input_precision="ieee")
            if SCALE_PRODUCTS:
                # Triton copies ahead what products are made of, not what they are multiplied with.
                products += added * _of_part(next_scale, 0, BITS, UNIT_GROUPS, GROUP_DTYPE, tl.float32)
                at = tl.minimum(unit + SLICES + slices, units - 1) // GROUP_UNITS * group_stride + group_rows
                next_scale = tl.load(scales + at)
            else:
                products = added
        total += products

    if SLICES > 1:
        total = tl.sum(total, axis=0)
    out_row = tl.arange(0, BLOCK_N)[:, None] + first_row
    out_token = tl.arange(0, BLOCK_M)[None, :] + first_token
    if bias is not None:
        total += tl.load(bias + out_row, mask=out_row < n, other=0.0).to(tl.float32)
    out += (split.to(tl.int64) * num_rows + out_token) * out_stride + out_row
    tl.store(out, total.to(out.dtype.element_ty), mask=(out_row < n) & (out_token < num_rows))


@triton.jit(do_not_specialize=["num_rows"])
def _sum_splits(partial, bias, out, num_rows, n, out_stride, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[m] = the sum of partial[0, m], partial[1, m], ... in this order (+ bias)."""
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(partial + (split * num_rows.to(tl.int64) + token) * n + row, mask=live, other=0.0)
    if bias is not None:
        total += tl.load(bias + row, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + row, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _dequantize(
    codes,
    scales,
    offsets,
    out,
    n,
    k,
    units,
    padded_n,
    group_stride,
    BLOCK_N: tl.constexpr,
    BITS: tl.constexpr,
    UNIT_GROUPS: tl.constexpr,
    GROUP_UNITS: tl.constexpr,
    GROUP_DTYPE: tl.constexpr,
    OFFSETS: tl.constexpr,
    ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """BLOCK_N rows of one unit, computed in float32."""
    unit = tl.program_id(0)
    first_row = tl.program_id(1) * BLOCK_N
    row = tl.arange(0, BLOCK_N)[:, None]
    word_at = tl.arange(0, 32)[None, :]
    row_block = tl.minimum(first_row // 16 + row // 16, padded_n // 16 - 1)
    word = tl.load(codes + ((row_block.to(tl.int64) * units + unit) * 512 + row % 16 * 32 + word_at))
    at = unit // GROUP_UNITS * group_stride + tl.minimum(first_row + tl.arange(0, BLOCK_N), padded_n - 1)
    scale, offset = _group_words(scales, offsets, at, OFFSETS, UNIT_GROUPS)
    for part in tl.static_range(16 // BITS):
        weight = _weights(
            word,
            scale,
            offset,
            part,
            True,
            OFFSETS,
            ZERO,
            BITS,
            UNIT_GROUPS,
            GROUP_DTYPE,
            False,
            tl.float32,
            NATIVE,
        )
        column = unit * (512 // BITS) + part * 32 + word_at
        pointers = out + (first_row + row).to(tl.int64) * k + column
        tl.store(pointers, weight.to(out.dtype.element_ty), mask=(first_row + row < n) & (column < k))


def weight_only_matmul(
    x: torch.Tensor,
    weight: PackedIntegers,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] times the transpose of `weight` [N, K] (+ bias [N]) -> [M, N]; sums are float32.

    x: float16 or bfloat16 (or float32, where kernels are interpreted), rows of any stride. `out_dtype`: that of x where
    neither is given. `workspace`: float32, at least `workspace_floats`. With `deterministic`, a row's result depends on
    that row alone, not on M.
    """
    num_rows, _ = x.shape
    if out is None:
        out = torch.empty(num_rows, weight.n, dtype=out_dtype or x.dtype, device=x.device)
    use = _settings(num_rows, weight, deterministic)
    split_k, slices = _split_k(use, weight), use["SLICES"]
    in_program = split_k if num_rows > _MOST_SPLIT_ROWS else 1
    partial = split_k > in_program
    if partial and workspace is None:
        workspace = torch.empty(split_k * num_rows * weight.n, dtype=torch.float32, device=x.device)
    launch(
        _matmul,
        (cdiv(weight.n, use["BLOCK_N"]), cdiv(num_rows, use["BLOCK_M"]), split_k // in_program),
        x,
        weight.codes,
        weight.scales,
        weight.offset_words,
        None if partial else bias,
        workspace if partial else out,
        num_rows,
        weight.n,
        weight.k,
        *_strides(weight),
        x.stride(0),
        weight.n if partial else out.stride(0),
        BLOCK_N=use["BLOCK_N"],
        BLOCK_M=use["BLOCK_M"],
        SLICES=slices,
        SPLIT_K=split_k,
        IN_PROGRAM=in_program,
        EVEN=weight.units % (split_k * slices) == 0 and weight.k % unit_inputs(weight.bits) == 0,
        BFLOAT16=x.dtype == torch.bfloat16,
        COMPUTE=tl.float32 if INTERPRETED else _TYPES[x.dtype],
        **_format(weight),
        num_warps=use["num_warps"],
        num_stages=use["num_stages"],
    )
    if partial:
        launch(
            _sum_splits,
            (cdiv(weight.n, _SUM_BLOCK), num_rows),
            workspace,
            bias,
            out,
            num_rows,
            weight.n,
            out.stride(0),
            SPLIT_K=split_k,
            BLOCK=_SUM_BLOCK,
            num_warps=2,
        )
    return out


def workspace_floats(num_rows: int, weight: PackedIntegers, *, deterministic: bool = False) -> int:
    """Elements of `workspace` that `weight_only_matmul` needs for [num_rows, K]."""
    split_k = _split_k(_settings(num_rows, weight, deterministic), weight)
    return 0 if split_k == 1 or num_rows > _MOST_SPLIT_ROWS else split_k * num_rows * weight.n


def dequantize(weight: PackedIntegers, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weight as numbers [N, K], rounded once to `dtype`: for a product by cuBLAS, or for rows of a table."""
    if out is None:
        out = torch.empty(weight.n, weight.k, dtype=dtype, device=weight.codes.device)
    use = choose("weight_only_dequantize", n=weight.n, k=weight.k, group=weight.group, bits=weight.bits)
    launch(
        _dequantize,
        (weight.units, cdiv(weight.n, use["BLOCK_N"])),
        weight.codes,
        weight.scales,
        weight.offset_words,
        out,
        weight.n,
        weight.k,
        *_strides(weight),
        **_format(weight),
        **use,
    )
    return out


def _settings(num_rows: int, weight: PackedIntegers, deterministic: bool) -> Mapping[str, Any]:
    shape = {"n": weight.n, "k": weight.k, "group": weight.group, "bits": weight.bits}
    if deterministic:
        return choose("weight_only_deterministic", **shape)
    return choose("weight_only", m=num_rows, **shape)


def _split_k(use: Mapping[str, Any], weight: PackedIntegers) -> int:
    """At most one split for each unit that a slice has."""
    return min(use["SPLIT_K"], cdiv(weight.units, use["SLICES"]))


def _strides(weight: PackedIntegers) -> tuple[int, int, int]:
    """(units, rows in memory, steps from a group to the next: 0 where a row is one)."""
    rows = weight.scales.shape[1]
    return weight.units, rows, 0 if weight.group >= weight.k else rows


def _format(weight: PackedIntegers) -> dict[str, Any]:
    unit = unit_inputs(weight.bits)
    return {
        "BITS": weight.bits,
        "UNIT_GROUPS": weight.unit_groups,
        "GROUP_UNITS": 1 if weight.group >= weight.k else max(1, weight.group // unit),
        "GROUP_DTYPE": _TYPES[weight.group_dtype],
        "OFFSETS": weight.offsets,
        "ZERO": weight.zero,
        "NATIVE": not INTERPRETED and architecture().startswith("sm_"),
    }
