"""What the sampler's kernels know of a row of logits after the one pass that reads all of it.

A row's ids lie in blocks of `BLOCK`; kept of each is its largest logit and the sum of its weights. A weight is
exp((logit - best) / temperature), in units of 2^-44 as int64: sums are the same in any order, and those of 2^18
weights stay below 2^63. In a block's own sum `best` is the block's largest logit, since the row's is not known yet.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import cdiv, launch

BLOCK = 128
CANDIDATES = 4096  # enough for nearly every distribution; where it is not, more passes are made over the row

LOG2_E = tl.constexpr(1.4426950408889634)
UNIT = tl.constexpr(2.0**44)


class Workspace(NamedTuple):
    """What the kernels of one call tell each other, for S rows of N blocks; calls on one stream may share it."""

    largest: torch.Tensor  # [S, N] float32: the largest logit of each block, NaN where it has one
    weights: torch.Tensor  # [S, N] int64: the sum of its weights
    larger: torch.Tensor  # [S, N] int32: how many of its logits are larger than a certain one
    bounds: torch.Tensor  # [S] float32: from which logit on the row's filters may keep a token
    found: torch.Tensor  # [S] int32: how many logits reach it
    candidates: torch.Tensor  # [S, C] float32: these logits, the first C of them
    candidate_ids: torch.Tensor  # [S, C] int32

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, device: torch.device, num_candidates: int = CANDIDATES
    ) -> "Workspace":
        """For up to `num_rows` rows of up to `vocab_size` logits: about 16 bytes a block and 32 KiB a row.

        `num_candidates` C, a power of two, is among how many logits the limits of top-k and top-p are found at once.
        """

        def column(dtype: torch.dtype, *width: int) -> torch.Tensor:
            return torch.empty(num_rows, *width, dtype=dtype, device=device)

        num_blocks = cdiv(vocab_size, BLOCK)
        return cls(
            largest=column(torch.float32, num_blocks),
            weights=column(torch.int64, num_blocks),
            larger=column(torch.int32, num_blocks),
            bounds=column(torch.float32),
            found=column(torch.int32),
            candidates=column(torch.float32, num_candidates),
            candidate_ids=column(torch.int32, num_candidates),
        )


@triton.jit
def exponent_scale(temperature, row):
    """What differences of a row's logits are multiplied by to be exponents of 2.

    Where the temperature is 0, and where there are none at all, that of temperature 1.
    """
    of_row = tl.full((), 1.0, tl.float32)
    if temperature is not None:
        given = tl.load(temperature + row)
        of_row = tl.where(given == 0, of_row, given)
    return tl.div_rn(tl.full((), LOG2_E, tl.float32), of_row)


@triton.jit
def weigh(x, best, scale):
    """float32 logits -> weights, int64."""
    return (tl.exp2((x - best) * scale) * UNIT).to(tl.int64)


@triton.jit
def load_logits(logits, ids, wanted):
    """float32 logits of `ids`, -inf where they are not `wanted`."""
    return tl.load(logits + ids, mask=wanted, other=float("-inf")).to(tl.float32)


@triton.jit
def load_logit(logits, token_id):
    """NaN for an id below 0."""
    return tl.load(logits + token_id, mask=token_id >= 0, other=float("nan")).to(tl.float32)


@triton.jit
def load_largest(largest, row, num_blocks, TILE: tl.constexpr):
    """[TILE] largest logits of the row's blocks, -inf beyond them; whether one is NaN."""
    number = tl.arange(0, TILE)
    found = tl.load(largest + row * num_blocks + number, mask=number < num_blocks, other=float("-inf"))
    return found, tl.max((found != found).to(tl.int32), 0) > 0


@triton.jit
def is_finite(best, any_nan):
    """Whether the row's best logit is a finite number, and all of them are numbers."""
    return (best > float("-inf")) & (best < float("inf")) & (any_nan == 0)


@triton.jit
def load_weights(weights, row, largest, best, scale, num_blocks):
    """[TILE] sums of the row's blocks as if all weights were by the row's best logit; `largest` [TILE]."""
    number = tl.arange(0, largest.shape[0])
    of_blocks = tl.load(weights + row * num_blocks + number, mask=number < num_blocks, other=0)
    return (of_blocks.to(tl.float64) * tl.exp2((largest - best) * scale).to(tl.float64)).to(tl.int64)


@triton.jit
def _block_statistics(
    logits,
    temperature,
    token_ids,
    largest,
    weights,
    larger,
    stride,
    vocab_size,
    num_blocks,
    WEIGHTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    logits += row * stride
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = row * num_blocks + number
    ids = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = load_logits(logits, ids, ids < vocab_size)
    best = tl.max(x, 1)
    any_nan = tl.max((x != x).to(tl.int32), 1) > 0
    tl.store(largest + at, tl.where(any_nan, float("nan"), best), mask=number < num_blocks)
    if WEIGHTS:
        finite = tl.where(best == float("-inf"), 0.0, best)
        of_blocks = tl.sum(weigh(x, finite[:, None], exponent_scale(temperature, row)), 1)
        tl.store(weights + at, of_blocks, mask=number < num_blocks)
    if RANKS:
        chosen = load_logit(logits, tl.load(token_ids + row))
        tl.store(larger + at, tl.sum((x > chosen).to(tl.int32), 1), mask=number < num_blocks)


def start_statistics(
    logits: torch.Tensor,
    space: Workspace,
    settings: Mapping[str, Any],
    temperature: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> None:
    """Fill `largest` of `space`; with temperatures [S] also `weights`; with ids [S] `weights`, by temperature 1, and
    `larger`, than the logits of these ids. `logits` is [S, V] in any float dtype, of contiguous rows.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = cdiv(vocab_size, BLOCK)
    launch(
        _block_statistics,
        (cdiv(num_blocks, settings["BLOCKS"]), num_rows),
        logits,
        temperature,
        token_ids,
        space.largest,
        space.weights,
        space.larger,
        logits.stride(0),
        vocab_size,
        num_blocks,
        WEIGHTS=temperature is not None or token_ids is not None,
        RANKS=token_ids is not None,
        BLOCK=BLOCK,
        fp_fusion=False,
        **settings,
    )
