"""Matrix products in which a row's bits do not depend on the other rows, and the kernel that `scaled_matmul` shares.

Libraries choose tiles and splits by the number of rows, so a row's products are added up in another order when the
batch changes (He et al. 2025, "Defeating nondeterminism in LLM inference"). Here the order follows from N and K alone:

- K is cut into segments (`segment_length`).
- Within a segment, one float32 accumulator takes the products in steps of the matrix instruction, first to last.
- The sums of the segments are added up in float32, first to last.

With few rows, each segment is a program of its own, so that enough of them run to draw on the memory's whole
bandwidth: partial sums go to memory, and a second kernel adds them up. With many rows one program goes through all
segments. The additions are the same, hence the bits.

The size of a tile does not occur in this order. A matrix instruction (mma, wgmma, mfma) computes an element of its
result from one row and one column, and in the same way wherever the element lies; Triton has each thread chain its
instructions along K in one accumulator. But no manufacturer promises the former, and the size can decide on the
instruction and so on its step along K: on Hopper tiles of fewer than 64 rows take mma and larger ones wgmma, and AMD's
mfma has forms for 16 and for 32 rows. Tables that were never measured therefore have one tile for all M. Others come in
by tuning on a device, where no settings count as right whose rows have other bits than the table's
(`tools.gpu_kernels.linears.require_same_bits`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, architecture, cdiv, launch
from kernels.gpu.numbers import as_bytes, decode_e4m3, native_e4m3
from kernels.gpu.tables import choose

LENGTH_UNIT = 128  # each BLOCK_K of the invariant products divides it; also the inputs that share a scale of a block

_SHORTEST_SEGMENT = 256
_ENOUGH_PROGRAMS = 128  # about as many as the larger cards have multiprocessors
_COUNTED_COLUMNS = 128  # of a tile, for `segment_length`: the tables' tiles may have others
_SUM_COLUMNS = 512


@triton.jit
def tile_of(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of a program's tile.

    GROUP_M rows of tiles are gone through column by column: programs that run at the same time then read few rows of
    both matrices, which the L2 cache holds.
    """
    in_group = GROUP_M * tiles_n
    first = program // in_group * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    return first + program % in_group % rows, program % in_group // rows


@triton.jit
def _number(code, CONVERT: tl.constexpr):
    """What a tile is multiplied as, where that is not what it is stored as."""
    if CONVERT == "e4m3":
        return decode_e4m3(code, False)
    elif CONVERT == "float32":
        return code.to(tl.float32)
    else:
        return code


@triton.jit
def _finish(total, rows, row_exists, columns, column_exists, x_scales, weight_scales, bias, SCALES: tl.constexpr):
    """float32 [rows, columns]: sums with their scales and bias."""
    y = total.to(tl.float32)
    if SCALES == "channels":
        y *= tl.load(x_scales + rows, mask=row_exists, other=0.0)[:, None]
        y *= tl.load(weight_scales + columns, mask=column_exists, other=0.0)[None, :]
    if bias is not None:
        y += tl.load(bias + columns, mask=column_exists, other=0.0).to(tl.float32)[None, :]
    return y


# One code for all m: nothing is gained by knowing that it is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["m"])
def _multiply(
    x,
    weight,
    x_scales,
    weight_scales,
    bias,
    out,
    m,
    n,
    k,
    x_stride,
    weight_stride,
    out_stride,
    span,
    run,
    SCALES: tl.constexpr,
    CONVERT: tl.constexpr,
    SPLIT: tl.constexpr,
    RUNS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Program (i, j): tile i over the inputs from j * span on; with SPLIT, `out` is [spans, m, n] of partial sums."""
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    in_rows = tl.arange(0, BLOCK_M)
    in_columns = tl.arange(0, BLOCK_N)
    rows = tile_m * BLOCK_M + in_rows
    columns = tile_n * BLOCK_N + in_columns
    row_exists = rows < m
    column_exists = columns < n
    first_row = (tile_m * BLOCK_M).to(tl.int64)
    first_column = (tile_n * BLOCK_N).to(tl.int64)
    x_rows = x + first_row * x_stride + in_rows * x_stride
    weight_rows = weight + first_column * weight_stride + in_columns * weight_stride
    # Swapped, it is the weight times x, transposed: a matrix instruction has more rows than columns, and no tile then
    # needs many more rows of x than there are.
    if SWAP:
        left_rows, left_exists, right_rows, right_exists = weight_rows, column_exists, x_rows, row_exists
    else:
        left_rows, left_exists, right_rows, right_exists = x_rows, row_exists, weight_rows, column_exists
    first = tl.program_id(1) * span
    inputs = first + tl.arange(0, BLOCK_K)
    left_at = left_rows[:, None] + inputs[None, :]
    right_at = right_rows[None, :] + inputs[:, None]
    integers: tl.constexpr = x.dtype.element_ty == tl.int8
    sums: tl.constexpr = tl.int32 if integers and SCALES != "blocks" else tl.float32
    part = tl.zeros((left_rows.shape[0], right_rows.shape[0]), sums)
    total = part
    end_of_run = first + run
    for start in range(first, tl.minimum(first + span, k), BLOCK_K):
        if EVEN_K:
            left = tl.load(left_at, mask=left_exists[:, None], other=0.0)
            right = tl.load(right_at, mask=right_exists[None, :], other=0.0)
        else:
            inside = tl.arange(0, BLOCK_K) < k - start
            left = tl.load(left_at, mask=left_exists[:, None] & inside[None, :], other=0.0)
            right = tl.load(right_at, mask=right_exists[None, :] & inside[:, None], other=0.0)
        left = _number(left, CONVERT)
        right = _number(right, CONVERT)
        if SCALES == "blocks":
            # BLOCK_N divides the 128 outputs of a block, so the tile has one scale of the weight.
            num_blocks = tl.cdiv(k, 128)
            block = start // 128
            scales = tl.load(x_scales + rows * num_blocks + block, mask=row_exists, other=0.0)
            scales *= tl.load(weight_scales + tile_n * BLOCK_N // 128 * num_blocks + block)
            products = tl.dot(left, right, out_dtype=tl.int32 if integers else tl.float32).to(tl.float32)
            part = tl.fma(products, scales[None, :] if SWAP else scales[:, None], part)
        elif integers:
            part = tl.dot(left, right, part, out_dtype=tl.int32)
        else:
            part = tl.dot(left, right, part, input_precision="ieee")
        if RUNS:
            reached = start + BLOCK_K
            if reached == end_of_run:
                total += part
                part = tl.zeros((left_rows.shape[0], right_rows.shape[0]), sums)
                end_of_run += run
        left_at += BLOCK_K
        right_at += BLOCK_K
    total += part
    if SWAP:
        total = tl.trans(total)
    if SPLIT:
        out += tl.program_id(1).to(tl.int64) * m * n
        y = total
    else:
        y = _finish(total, rows, row_exists, columns, column_exists, x_scales, weight_scales, bias, SCALES)
    out += first_row * out_stride + first_column
    exists = row_exists[:, None] & column_exists[None, :]
    tl.store(out + in_rows[:, None] * out_stride + in_columns[None, :], y.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_spans"])
def _add_partial_sums(
    partial,
    x_scales,
    weight_scales,
    bias,
    out,
    n,
    out_stride,
    num_spans,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (i, j): COLUMNS columns of row i, from [spans, rows, n]."""
    num_rows = tl.num_programs(0)
    row = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (columns < n)[None, :]
    at = partial + row.to(tl.int64)[:, None] * n + columns[None, :]
    total = tl.zeros((1, COLUMNS), partial.dtype.element_ty)
    for _ in range(num_spans):
        total += tl.load(at, mask=exists, other=0.0)
        at += num_rows.to(tl.int64) * n
    y = _finish(total, row, row < num_rows, columns, columns < n, x_scales, weight_scales, bias, SCALES)
    out += row.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out, y.to(out.dtype.element_ty), mask=exists)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is computed."""

    settings: Mapping[str, Any]
    span: int  # inputs that one program goes through: a multiple of BLOCK_K, or all
    run: int  # inputs whose products are added up before the sum goes into another one: a multiple of BLOCK_K, or all

    def workspace_bytes(self, m: int, n: int, k: int) -> int:
        """How large the partial sums of an [m, k] by [k, n] product are."""
        spans = cdiv(k, self.span)
        return 4 * spans * m * n if spans > 1 else 0


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] times weight [N, K], plus bias [N] -> [M, N]; a row's bits do not depend on M or on its place.

    `x` and `weight` are both bfloat16, float16 or float32; their rows are contiguous, as are those of `out`. Sums are
    float32; the result is `out_dtype`, by default that of `x`. `workspace`: see `workspace_bytes`.
    """
    if out is None:
        out = x.new_empty(len(x), len(weight), dtype=out_dtype or x.dtype)
    return multiply(x, weight, bias, out, workspace, invariant_plan(*out.shape, x.shape[1], kind_of(x.dtype)))


def workspace_bytes(m: int, n: int, k: int, dtype: torch.dtype) -> int:
    """How large the `workspace` of `matmul` must be: contiguous, of any dtype. Without one as much is allocated."""
    return invariant_plan(m, n, k, kind_of(dtype)).workspace_bytes(m, n, k)


def kind_of(dtype: torch.dtype) -> str:
    """What the tables call operands of this dtype."""
    return {torch.float32: "float32", torch.float8_e4m3fn: "float8", torch.int8: "int8"}.get(dtype, "float16")


def segment_length(n: int, k: int) -> int:
    """The inputs of a segment: so many segments that even with few rows a large card is busy."""
    tiles = cdiv(n, _COUNTED_COLUMNS)
    segments = 1
    while tiles * segments < _ENOUGH_PROGRAMS and k >= 2 * segments * _SHORTEST_SEGMENT:
        segments *= 2
    return cdiv(cdiv(k, segments), LENGTH_UNIT) * LENGTH_UNIT


def longest_run(kind: str) -> int | None:
    """How many products the matrix instruction may add up by itself; None: any number.

    Hopper keeps only about 14 bits of a sum of e4m3 products (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3.2), and cuts
    the rest off after each 32 inputs: in a run of 512, 16 times 2^-13 of the sum. bfloat16 rounds off up to 2^-8.
    """
    return 512 if kind == "float8" and architecture() == "sm_90" else None


def invariant_plan(m: int, n: int, k: int, kind: str) -> Plan:
    """A plan under which a row's bits do not depend on M."""
    settings = choose("matmul", m=m, n=n, k=k, kind=kind)
    length = longest_run(kind) or segment_length(n, k)
    return Plan(settings, length if settings["SPLIT"] else k, length)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    plan: Plan,
    x_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`matmul`, or with scales `scaled_matmul`, as planned."""
    (m, k), n = x.shape, len(weight)
    settings = plan.settings
    scales = "" if x_scales is None else "blocks" if x_scales.dim() == 2 else "channels"
    convert = ""
    if x.dtype == torch.float8_e4m3fn and not native_e4m3():
        convert, x, weight = "e4m3", as_bytes(x), as_bytes(weight)
    elif x.dtype == torch.bfloat16 and INTERPRETED:
        convert = "float32"  # numpy has no bfloat16
    spans = cdiv(k, plan.span)
    target, target_stride = out, out.stride(0)
    if spans > 1:
        dtype = torch.int32 if x.dtype == torch.int8 and scales == "channels" else torch.float32
        target = x.new_empty(spans * m * n, dtype=dtype) if workspace is None else workspace.view(dtype)
        target_stride = n
    launch(
        _multiply,
        (cdiv(m, settings["BLOCK_M"]) * cdiv(n, settings["BLOCK_N"]), spans),
        x,
        weight,
        x_scales,
        weight_scales,
        bias,
        target,
        m,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        target_stride,
        plan.span,
        plan.run,
        SCALES=scales,
        CONVERT=convert,
        SPLIT=spans > 1,
        RUNS=plan.run < min(plan.span, k),
        SWAP=settings["SWAP"],
        EVEN_K=k % settings["BLOCK_K"] == 0,
        BLOCK_M=settings["BLOCK_M"],
        BLOCK_N=settings["BLOCK_N"],
        BLOCK_K=settings["BLOCK_K"],
        GROUP_M=settings["GROUP_M"],
        num_warps=settings["num_warps"],
        num_stages=settings["num_stages"],
        fp_fusion=False,  # so that scales and bias round as they do in _add_partial_sums
    )
    if spans > 1:
        in_sums = scales == "blocks"
        launch(
            _add_partial_sums,
            (m, cdiv(n, _SUM_COLUMNS)),
            target,
            None if in_sums else x_scales,
            None if in_sums else weight_scales,
            bias,
            out,
            n,
            out.stride(0),
            spans,
            SCALES="" if in_sums else scales,
            COLUMNS=_SUM_COLUMNS,
            fp_fusion=False,
        )
    return out
