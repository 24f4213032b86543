"""The logits that a row's filters may keep, gathered in a list: by two kernels, the second one spread over the row.

See `kernels.gpu.selection`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.block_statistics import (
    BLOCK,
    Workspace,
    exponent_scale,
    is_finite,
    load_largest,
    load_weights,
)
from kernels.gpu.launch import cdiv, launch
from kernels.gpu.selection import bound_limit, load_blocks, smallest_weighed, weight_of_top_p, write_candidates


@triton.jit
def _bound_candidates(
    temperature,
    top_k,
    top_p,
    min_p,
    largest,
    weights,
    bounds,
    found,
    vocab_size,
    num_blocks,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a row: a logit that all tokens reach that its filters may keep; inf where there is no filter to apply."""
    row = tl.program_id(0).to(tl.int64)
    of_blocks, any_nan = load_largest(largest, row, num_blocks, TILE)
    best = tl.max(of_blocks, 0)
    bound = tl.full((), float("inf"), tl.float32)
    if (tl.load(temperature + row) > 0) & is_finite(best, any_nan):
        scale = exponent_scale(temperature, row)
        block_weights = load_weights(weights, row, of_blocks, best, scale, num_blocks)
        count = tl.load(top_k + row).to(tl.int32)
        share = tl.load(top_p + row).to(tl.float64)
        smallest = tl.load(min_p + row)
        if (count > 0) & (count < vocab_size):
            bound = bound_limit(of_blocks, block_weights, best, scale, count, True, BLOCK)
        else:
            if smallest > 0:
                # A little less, since this is rounded.
                exponent = tl.log2(tl.minimum(smallest, 1.0)) - 0.001
                bound = tl.maximum(best + tl.div_rn(exponent, scale), smallest_weighed(best, scale))
            if share < 1:
                wanted = weight_of_top_p(share, tl.sum(block_weights, 0))
                of_top_p = bound_limit(of_blocks, block_weights, best, scale, wanted, False, BLOCK)
                bound = tl.where(smallest > 0, tl.maximum(bound, of_top_p), of_top_p)
    tl.store(bounds + row, bound)
    tl.store(found + row, 0)


@triton.jit
def _collect_candidates(
    logits,
    largest,
    bounds,
    found,
    candidates,
    candidate_ids,
    stride,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Make the list of the logits that reach the row's bound, in no certain order."""
    row = tl.program_id(1).to(tl.int64)
    bound = tl.load(bounds + row)
    if bound < float("inf"):
        _, _, ids, x = load_blocks(
            logits + row * stride,
            largest + row * num_blocks,
            tl.program_id(0) * BLOCKS,
            bound,
            vocab_size,
            num_blocks,
            BLOCK,
            BLOCKS,
        )
        inside = x >= bound
        count = tl.sum(tl.sum(inside.to(tl.int32), 1), 0)
        if count > 0:
            start = tl.atomic_add(found + row, count, sem="relaxed")
            candidates += row * CANDIDATES
            candidate_ids += row * CANDIDATES
            write_candidates(x, ids, inside, start, candidates, candidate_ids, CANDIDATES)


def collect_candidates(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    space: Workspace,
    settings: Mapping[str, Mapping[str, Any]],
) -> None:
    """From `largest` and `weights` of `space` fill `bounds`, `found`, `candidates` and `candidate_ids`.

    `settings`: those named "bound" and "collect".
    """
    num_rows, vocab_size = logits.shape
    num_blocks = cdiv(vocab_size, BLOCK)
    launch(
        _bound_candidates,
        (num_rows,),
        temperature,
        top_k,
        top_p,
        min_p,
        space.largest,
        space.weights,
        space.bounds,
        space.found,
        vocab_size,
        num_blocks,
        TILE=triton.next_power_of_2(num_blocks),
        BLOCK=BLOCK,
        fp_fusion=False,
        **settings["bound"],
    )
    launch(
        _collect_candidates,
        (cdiv(num_blocks, settings["collect"]["BLOCKS"]), num_rows),
        logits,
        space.largest,
        space.bounds,
        space.found,
        space.candidates,
        space.candidate_ids,
        logits.stride(0),
        vocab_size,
        num_blocks,
        BLOCK=BLOCK,
        CANDIDATES=space.candidates.shape[1],
        fp_fusion=False,
        **settings["collect"],
    )
