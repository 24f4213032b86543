"""Cases of the matrix products of 8-bit operands, with float32 scales."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kernels import reference
from kernels.gpu.launch import cdiv
from kernels.gpu.scaled_matmul import SCALE_BLOCK, scaled_matmul
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.linears import (
    LARGE_LAYERS,
    LAYERS,
    SQUARES,
    Linear,
    Tile,
    codes,
    oracle_dtype,
    require_same_bits,
    with_rows,
)
from tools.gpu_kernels.rows import normal

_DTYPES = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "blocks": torch.float8_e4m3fn}
_FEWEST_INT_MM_ROWS = 17  # of torch._int_mm

_SMALL = (
    Tile(16, 32, 128, False, 4, 6),
    Tile(16, 32, 256, False, 4, 5),
    Tile(16, 64, 128, False, 4, 6),
    Tile(16, 64, 128, True, 4, 8),
    Tile(16, 64, 256, True, 4, 4),
    Tile(16, 128, 128, True, 4, 5),
)
_MEDIUM = (
    Tile(32, 64, 128, True, 4, 5),
    Tile(64, 64, 128, True, 4, 4),
    Tile(64, 64, 64, False, 4, 4),
    Tile(64, 128, 64, False, 4, 3),
    Tile(64, 128, 128, False, 4, 4),
    Tile(64, 128, 128, False, 8, 4),
)
_LARGE = (
    *_MEDIUM[-3:],
    Tile(128, 128, 64, False, 8, 4),
    Tile(128, 128, 128, False, 8, 3),
    Tile(128, 128, 128, False, 8, 4),
    Tile(64, 256, 128, False, 8, 3),
    Tile(128, 256, 128, False, 8, 3),
    Tile(128, 256, 64, False, 8, 4),
)


def cases() -> list[Case]:
    return [
        *(_case(m, linear, "float8") for m, linear in with_rows(SQUARES + LAYERS)),
        *(_case(m, linear, "int8") for m, linear in with_rows(SQUARES + LARGE_LAYERS)),
        *(_case(m, linear, "blocks") for m, linear in with_rows(SQUARES)),
        *(_case(m, linear, kind, True) for kind in ("float8", "blocks") for m, linear in with_rows(SQUARES[:1])),
    ]


def _case(m: int, linear: Linear, kind: str, deterministic: bool = False) -> Case:
    n, k = linear.n, linear.k
    shape: dict[str, int | str] = {"m": m, "n": n, "k": k, "kind": kind}
    num_scales = cdiv(k, SCALE_BLOCK) * (m + cdiv(n, SCALE_BLOCK)) if kind == "blocks" else m + n
    return Case(
        "matmul" if deterministic else "scaled_matmul",
        f"{linear.name} m={m} {kind}",
        shape,
        partial(_prepare, m, linear, kind, deterministic),
        num_bytes=k * (m + n) + 2 * m * n + 4 * num_scales,
        operations=2 * m * n * k,
        precision="int8" if kind == "int8" else "float8",
        rival=_rival_name(m, kind, deterministic),
        tolerance=2**-8 + 2**-9,  # the rounding to bfloat16, and what Hopper's accumulator loses of e4m3
        candidates=() if deterministic else _candidates(m, kind),
    )


def _rival_name(m: int, kind: str, deterministic: bool) -> str:
    if deterministic or kind == "blocks" or (kind == "int8" and m < _FEWEST_INT_MM_ROWS):
        return ""
    return "torch._int_mm, without scales" if kind == "int8" else "torch._scaled_mm"


def _candidates(m: int, kind: str) -> tuple[Mapping[str, Any], ...]:
    tiles = _SMALL if m <= 16 else _MEDIUM if m <= 256 else _LARGE
    splits = (1, 2, 4) if m <= 256 else (1,)
    return tuple(
        tile.settings(SPLIT_K=split)
        for tile in tiles
        for split in splits
        if kind != "blocks" or max(tile.block_n, tile.block_k) <= SCALE_BLOCK
    )


def _prepare(m: int, linear: Linear, kind: str, deterministic: bool, device: torch.device, seed: int) -> Prepared:
    n, k = linear.n, linear.k
    x = codes(device, seed, m, k, dtype=_DTYPES[kind])
    weight = codes(device, seed + 1, n, k, dtype=_DTYPES[kind])
    if kind == "blocks":
        columns = cdiv(k, SCALE_BLOCK)
        x_scales = _scales(device, seed + 2, m, columns)
        weight_scales = _scales(device, seed + 3, cdiv(n, SCALE_BLOCK), columns)
    else:
        x_scales, weight_scales = _scales(device, seed + 2, m), _scales(device, seed + 3, n)

    def product(rows: slice) -> torch.Tensor:
        return scaled_matmul(x[rows], x_scales[rows], weight, weight_scales, deterministic=deterministic)

    if deterministic and device.type != "meta":
        require_same_bits(product, m)
    wide = oracle_dtype(n, k)

    def rival() -> torch.Tensor:
        if kind == "int8":
            return torch._int_mm(x, weight.t())
        return torch._scaled_mm(x, weight.t(), x_scales[:, None], weight_scales[None], out_dtype=torch.bfloat16)

    return Prepared(
        launch=lambda: product(slice(0, m)),
        expected=lambda: reference.scaled_linear(x, x_scales.to(wide), weight, weight_scales.to(wide)),
        rival=rival if _rival_name(m, kind, deterministic) else None,
    )


def _scales(device: torch.device, seed: int, *shape: int) -> torch.Tensor:
    return normal(device, seed, *shape, dtype=torch.float32).abs_().add_(0.5)
