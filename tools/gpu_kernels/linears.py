"""Shapes of linear layers that matrix products are measured on, and random data for them."""

from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from typing import Any, NamedTuple

import torch

from tools.gpu_kernels.rows import LLAMA_8B, MODELS, Model, normal

ROWS = (1, 16, 64, 256, 4096)
_MOST_FLOAT64 = 1 << 25  # weights of an oracle that is computed in float64; of larger ones it is float32


class Tile(NamedTuple):
    """Settings that are tried for a matrix product."""

    block_m: int
    block_n: int
    block_k: int
    swap: bool
    num_warps: int
    num_stages: int

    def settings(self, **split: int) -> dict[str, Any]:
        """As in the tables; `split` names how K is split up."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": 8,
            "SWAP": self.swap,
            **split,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


class Linear(NamedTuple):
    """A weight [n, k]."""

    name: str
    n: int
    k: int


def _layers(model: Model) -> tuple[Linear, ...]:
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    return (
        Linear(f"{model.name} qkv", qkv, model.hidden),
        Linear(f"{model.name} output", model.hidden, model.heads * model.head_dim),
        Linear(f"{model.name} gate and up", 2 * model.intermediate, model.hidden),
        Linear(f"{model.name} down", model.hidden, model.intermediate),
    )


SQUARES = tuple(Linear(f"square {size}", size, size) for size in (4096, 8192))
LAYERS = tuple(linear for model in MODELS for linear in _layers(model))
LARGE_LAYERS = _layers(LLAMA_8B)
HEADS = tuple(Linear(f"{model.name} head", model.vocabulary, model.hidden) for model in MODELS)


def with_rows(linears: Sequence[Linear], rows: Sequence[int] = ROWS) -> Iterator[tuple[int, Linear]]:
    return ((m, linear) for linear in linears for m in rows)


def codes(device: torch.device, seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normally distributed int8 or float8 numbers, which use most of the dtype's range."""
    return normal(device, seed, *shape).mul_(40).clamp_(-127, 127).to(dtype)


def oracle_dtype(n: int, k: int) -> torch.dtype:
    """float64, or float32 where the weight would take too much memory: still a thousand times finer than bfloat16."""
    return torch.float64 if n * k <= _MOST_FLOAT64 else torch.float32


def require_same_bits(product: Callable[[slice], torch.Tensor], num_rows: int) -> None:
    """Raise ValueError unless rows have the same bits alone as among all.

    Alone they are computed with the settings of the table, even where others are being tried: so no settings are found
    to be right whose rows differ from those of the table.
    """
    together = product(slice(0, num_rows))
    for row in sorted({0, num_rows // 2, num_rows - 1}):
        alone = Context().run(product, slice(row, row + 1))
        if not torch.equal(alone[0], together[row]):
            raise ValueError(f"row {row} of {num_rows} has other bits than alone")
