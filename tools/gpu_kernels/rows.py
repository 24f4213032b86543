"""What the cases of kernels that treat activations row by row share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

TOKENS = (1, 64, 4096, 8192)
QUANTIZED = (torch.float8_e4m3fn, torch.int8)
EPS = 1e-5
WIDEST = 16384  # hidden states of Llama-3.1-405B
_PIECE = 1024  # rows


@dataclass(frozen=True, slots=True)
class Model:
    """The shapes of one rank of a model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int


LLAMA_8B = Model("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256)
MODELS = (
    LLAMA_8B,
    Model("Qwen2.5-1.5B", 1536, 12, 2, 128, 8960, 151936),
    Model("SmolLM2-135M", 576, 9, 3, 64, 1536, 49152),
)


def normal(device: torch.device, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normally distributed numbers; on "meta" there are none."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device=device)


def by_rows(function: Callable[..., Any], *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `function` of the `rows` [T, ...] gives in float64, some rows at a time, and kept in float32 to save memory.

    It returns a tensor [T, ...] or a tuple of such.
    """
    pieces = []
    for start in range(0, len(rows[0]), _PIECE):
        result = function(*(part[start : start + _PIECE].double() for part in rows))
        pieces.append([part.float() for part in (result if isinstance(result, tuple) else (result,))])
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def codes_and_scales(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> (codes before they are rounded, scales [...])."""
    scales = x.abs().amax(-1) / (127 if dtype == torch.int8 else 448)
    return x / scales[..., None].clamp(min=torch.finfo(torch.float64).tiny), scales


def tolerance(dtype: torch.dtype) -> float:
    """Three roundings of bfloat16 are less than 3/256, half a step at the largest code of int8 1/254, of e4m3 1/28."""
    return {torch.float8_e4m3fn: 0.05, torch.int8: 0.02}.get(dtype, 0.015)


def block_candidates(width: int, blocks: Iterable[int], per_thread: tuple[int, int]) -> tuple[Mapping[str, Any], ...]:
    """Settings for rows of `width`, of fewest to most elements a thread; no two that come to the same for it."""
    whole = 1 << (width - 1).bit_length()
    return tuple(
        {"BLOCK": block, "num_warps": warps}
        for block, warps in product(sorted({min(block, whole) for block in blocks}), (1, 2, 4, 8, 16, 32))
        if per_thread[0] <= block / (32 * warps) <= per_thread[1]
    )


def whole_row_candidates(width: int) -> tuple[Mapping[str, Any], ...]:
    """Of kernels that treat a row in one program."""
    return block_candidates(width, (1024, 2048, 4096, 8192, 16384), (4, 64))
