"""Cases of the batch-invariant matrix product, and of the choice between it and cuBLAS where bits may vary."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.gpu.matmul import kind_of, matmul
from kernels.gpu.tables import choose
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.linears import (
    HEADS,
    LAYERS,
    ROWS,
    SQUARES,
    Linear,
    Tile,
    oracle_dtype,
    require_same_bits,
    with_rows,
)
from tools.gpu_kernels.rows import normal

# Only those whose rows have the bits of the table's can be found to be right: see `require_same_bits`.
_SMALL = (
    Tile(16, 64, 128, True, 4, 5),
    Tile(16, 128, 64, True, 4, 5),
    Tile(64, 64, 64, False, 4, 5),
    Tile(64, 64, 128, False, 4, 4),
    Tile(64, 128, 64, False, 4, 3),
    Tile(64, 128, 64, False, 4, 4),
)
_LARGE = (
    *_SMALL[-2:],
    Tile(64, 128, 32, False, 4, 4),
    Tile(64, 256, 64, False, 8, 3),
    Tile(128, 64, 64, False, 4, 4),
    Tile(128, 128, 64, False, 8, 4),
    Tile(128, 256, 32, False, 8, 4),
    Tile(128, 256, 64, False, 8, 3),
)
_TOLERANCE = 5e-3  # of which the rounding to bfloat16 is 2^-8
_MOST_HEAD_ROWS = 256  # logits of more take gigabytes


def cases() -> list[Case]:
    head_rows = [rows for rows in ROWS if rows <= _MOST_HEAD_ROWS]
    layers = [*with_rows(SQUARES + LAYERS), *with_rows(HEADS, head_rows)]
    invariant = [_case(m, linear, torch.bfloat16) for m, linear in layers]
    wide = [_case(m, LAYERS[-1], torch.float32) for m in ROWS]
    return [*invariant, *wide, *(_choice(m, linear) for m, linear in layers)]


def _case(m: int, linear: Linear, dtype: torch.dtype) -> Case:
    out_dtype = torch.float32 if linear in HEADS else dtype
    shape: dict[str, int | str] = {"m": m, "n": linear.n, "k": linear.k, "kind": kind_of(dtype)}
    return Case(
        "matmul",
        f"{linear.name} m={m} {str(dtype).removeprefix('torch.')}",
        shape,
        partial(_prepare, m, linear, dtype, out_dtype),
        num_bytes=dtype.itemsize * linear.k * (m + linear.n) + out_dtype.itemsize * m * linear.n,
        operations=2 * m * linear.n * linear.k,
        precision="bfloat16" if dtype == torch.bfloat16 else "float32",
        rival="cuBLAS",
        tolerance=_TOLERANCE if out_dtype == torch.bfloat16 else 1e-4,
        hot=dtype == torch.bfloat16,
        candidates=_candidates(m) if dtype == torch.bfloat16 else (),
    )


def _candidates(m: int) -> tuple[Mapping[str, Any], ...]:
    tiles = _SMALL if m <= 64 else _LARGE
    splits = {256: (False, True), 4096: (False,)}.get(m, (True,))
    return tuple(tile.settings(SPLIT=split) for tile in tiles for split in splits)


def _prepare(
    m: int, linear: Linear, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device, seed: int
) -> Prepared:
    x = normal(device, seed, m, linear.k, dtype=dtype)
    weight = normal(device, seed + 1, linear.n, linear.k, dtype=dtype)
    if device.type != "meta":
        require_same_bits(lambda rows: matmul(x[rows], weight, out_dtype=out_dtype), m)
    wide = oracle_dtype(linear.n, linear.k)
    return Prepared(
        launch=lambda: matmul(x, weight, out_dtype=out_dtype),
        expected=lambda: reference.linear(x.to(wide), weight.to(wide)),
        rival=lambda: F.linear(x, weight),
    )


def _choice(m: int, linear: Linear) -> Case:
    """What a linear is computed by where a row's bits may depend on the batch."""
    return Case(
        "linear",
        f"{linear.name} m={m}",
        {"m": m, "n": linear.n, "k": linear.k},
        partial(_prepare_choice, m, linear),
        num_bytes=2 * (linear.k * (m + linear.n) + m * linear.n),
        operations=2 * m * linear.n * linear.k,
        tolerance=_TOLERANCE,
        candidates=({"implementation": "cublas"}, {"implementation": "triton"}),
    )


def _prepare_choice(m: int, linear: Linear, device: torch.device, seed: int) -> Prepared:
    x = normal(device, seed, m, linear.k)
    weight = normal(device, seed + 1, linear.n, linear.k)
    wide = oracle_dtype(linear.n, linear.k)

    def launch() -> torch.Tensor:
        chosen = choose("linear", m=m, n=linear.n, k=linear.k)["implementation"]
        return F.linear(x, weight) if chosen == "cublas" else matmul(x, weight)

    return Prepared(launch, expected=lambda: reference.linear(x.to(wide), weight.to(wide)))
