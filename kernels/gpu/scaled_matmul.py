"""Matrix products of 8-bit operands with float32 scales (W8A8): int8 (Dettmers et al. 2022) and float8 e4m3.

The kernel is that of `kernels.gpu.matmul`. int8 is added up in int32, exactly; e4m3 in float32, on Hopper in runs of
512 inputs (`longest_run`), or with scales of blocks in runs of one block. Where no matrix instruction takes e4m3 as it
is (sm_80, consumer cards, gfx942, whose own format has another bias), both operands become float16 first, exactly.
"""

import torch
import torch.nn.functional as F

from kernels.gpu.launch import cdiv
from kernels.gpu.matmul import LENGTH_UNIT, Plan, invariant_plan, kind_of, longest_run, multiply
from kernels.gpu.numbers import largest_of
from kernels.gpu.tables import choose

SCALE_BLOCK = 128  # inputs, and of a weight also outputs, that share a scale of a block


def scaled_matmul(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x * x_scales) [M, K] times (weight * weight_scales) [N, K], plus bias [N] -> [M, N].

    `x` and `weight` are both int8 or both float8_e4m3fn; their rows are contiguous, as are those of `out`. Scales are
    float32 and contiguous: `x_scales` [M], one a token, with `weight_scales` [N], one an output channel; or [M,
    ceil(K / 128)] with [ceil(N / 128), ceil(K / 128)], as in DeepSeek's checkpoints. `deterministic`: a row's bits do
    not depend on M or on its place. `workspace`: see `workspace_bytes`.
    """
    if out is None:
        out = x.new_empty(len(x), len(weight), dtype=out_dtype)
    plan = _plan(*out.shape, x.shape[1], _kind(x.dtype, x_scales.dim() == 2), deterministic)
    return multiply(x, weight, bias, out, workspace, plan, x_scales, weight_scales)


def workspace_bytes(
    m: int, n: int, k: int, dtype: torch.dtype, block_scaled: bool = False, deterministic: bool = False
) -> int:
    """How large the `workspace` of `scaled_matmul` must be: contiguous, of any dtype. Without one as much is allocated.

    `dtype` is that of the operands.
    """
    return _plan(m, n, k, _kind(dtype, block_scaled), deterministic).workspace_bytes(m, n, k)


def _kind(dtype: torch.dtype, block_scaled: bool) -> str:
    return "blocks" if block_scaled else kind_of(dtype)


def _plan(m: int, n: int, k: int, kind: str, deterministic: bool) -> Plan:
    if deterministic and kind != "int8":  # whose sums are the same in any order
        return invariant_plan(m, n, k, kind)
    settings = choose("scaled_matmul", m=m, n=n, k=k, kind=kind)
    run = longest_run(kind)
    unit = max(settings["BLOCK_K"], run or LENGTH_UNIT)
    span = cdiv(cdiv(k, settings["SPLIT_K"]), unit) * unit
    return Plan(settings, span, run or k)


def quantize_weight(
    weight: torch.Tensor, dtype: torch.dtype, block_scaled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (codes [N, K] int8 or float8_e4m3fn, scales [N] or [ceil(N / 128), ceil(K / 128)] float32).

    The largest magnitude of an output channel, or of a block, becomes the largest number of the dtype; the scale of
    zeros is 0.
    """
    values = weight.float()
    n, k = values.shape
    if not block_scaled:
        codes, scales = _quantize(values, dtype)
        return codes, scales.flatten()
    rows, columns = cdiv(n, SCALE_BLOCK), cdiv(k, SCALE_BLOCK)
    padded = F.pad(values, (0, columns * SCALE_BLOCK - k, 0, rows * SCALE_BLOCK - n))
    blocks = padded.view(rows, SCALE_BLOCK, columns, SCALE_BLOCK).transpose(1, 2)
    codes, scales = _quantize(blocks.flatten(2), dtype)
    codes = codes.view(blocks.shape).transpose(1, 2).reshape(padded.shape)
    return codes[:n, :k].contiguous(), scales.view(rows, columns)


def _quantize(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales [..., 1]: one for the values along the last axis."""
    largest = largest_of(dtype)
    scales = values.abs().amax(-1, keepdim=True) / largest
    scaled = (values / scales.clamp(min=torch.finfo(torch.float32).tiny)).clamp_(-largest, largest)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales
