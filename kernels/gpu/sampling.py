"""From logits to tokens on the device: greedy choice, draws behind top-k, top-p and min-p, and log-probabilities.

`gpu_workers.sampling` says what each filter keeps and how a token is drawn; equals at the edge of a filter all stay.
Logits are read once, spread over the whole device (`kernels.gpu.block_statistics`); from what is then known of blocks
of ids, few have to be read again (`kernels.gpu.candidates`). What takes a row as a whole is done by one program a row.

Weights are summed as integers. So a row's token has the same bits alone and in any batch, on any number of programs,
and with any settings of the tables. It is another one than that of `gpu_workers.sampling` only where a sum of weights
lies within their rounding of what it is compared with: exponentials are those of the hardware's exp2, with a relative
error of some 1e-6, and a weight below 2^-44 of the row's largest may count as nothing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.block_statistics import (
    BLOCK,
    GREEDY_BELOW,
    UNIT,
    Workspace,
    exponent_scale,
    is_finite,
    load_largest,
    load_logit,
    load_logits,
    load_weights,
    start_statistics,
    weigh,
)
from kernels.gpu.candidates import collect_candidates
from kernels.gpu.launch import cdiv, launch
from kernels.gpu.selection import find_limits, load_blocks, load_candidates
from kernels.gpu.tables import choose

MOST_LOGPROBS = BLOCK


class LogProbabilities(NamedTuple):
    chosen: torch.Tensor  # [S] float32, of the given tokens
    top_ids: torch.Tensor  # [S, top] int32, best first and of equals the lowest
    top_values: torch.Tensor  # [S, top] float32, theirs
    ranks: torch.Tensor  # [S] int32, of the given tokens: one more than the number of logits larger than theirs

    @classmethod
    def allocate(cls, num_rows: int, top: int, device: torch.device) -> "LogProbabilities":
        return cls(
            chosen=torch.empty(num_rows, dtype=torch.float32, device=device),
            top_ids=torch.empty(num_rows, top, dtype=torch.int32, device=device),
            top_values=torch.empty(num_rows, top, dtype=torch.float32, device=device),
            ranks=torch.empty(num_rows, dtype=torch.int32, device=device),
        )


@triton.jit
def _best_id(logits, largest, vocab_size, BLOCK: tl.constexpr):
    """The lowest id of the row's largest logit; `largest` [TILE] holds those of the blocks, without NaN."""
    best = tl.max(largest, 0)
    block = tl.min(tl.where(largest == best, tl.arange(0, largest.shape[0]), largest.shape[0]), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, ids, ids < vocab_size)
    return tl.min(tl.where(x == best, ids, vocab_size), 0)


@triton.jit
def _best_ids(logits, largest, out, stride, vocab_size, num_blocks, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    of_blocks, any_nan = load_largest(largest, row, num_blocks, TILE)
    best = _best_id(logits + row * stride, of_blocks, vocab_size, BLOCK)
    tl.store(out + row, tl.where(any_nan, -1, best))


@triton.jit
def _choose_tokens(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    largest,
    weights,
    bounds,
    found,
    candidates,
    candidate_ids,
    out,
    stride,
    vocab_size,
    num_blocks,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    of_blocks, any_nan = load_largest(largest, row, num_blocks, TILE)
    best = tl.max(of_blocks, 0)
    token_id = tl.full((), -1, tl.int32)
    if tl.load(temperature + row) < GREEDY_BELOW:
        token_id = tl.where(any_nan, -1, _best_id(logits, of_blocks, vocab_size, BLOCK))
    elif is_finite(best, any_nan):
        scale = exponent_scale(temperature, row)
        uniform = tl.load(uniforms + row)
        bound = tl.load(bounds + row)
        num_found = tl.load(found + row)
        candidates += row * CANDIDATES
        candidate_ids += row * CANDIDATES
        smallest_logit = tl.full((), float("-inf"), tl.float32)
        smallest_weight = tl.full((), 0.0, tl.float32)
        filtered = bound < float("inf")
        if filtered:
            smallest_logit, smallest_weight = find_limits(
                logits,
                tl.load(top_k + row).to(tl.int32),
                tl.load(top_p + row).to(tl.float64),
                tl.load(min_p + row),
                tl.sum(load_weights(weights, row, of_blocks, best, scale, num_blocks), 0),
                largest + row * num_blocks,
                best,
                scale,
                bound,
                num_found,
                candidates,
                candidate_ids,
                vocab_size,
                num_blocks,
                BLOCK,
                BLOCKS,
                CANDIDATES,
            )
        if filtered & (num_found <= CANDIDATES):
            token_id = _draw_from_list(
                candidates,
                candidate_ids,
                num_found,
                best,
                scale,
                smallest_logit,
                smallest_weight,
                uniform,
                vocab_size,
                CANDIDATES,
            )
        else:
            if filtered:
                _weigh_kept(
                    logits,
                    largest + row * num_blocks,
                    weights + row * num_blocks,
                    best,
                    scale,
                    bound,
                    smallest_logit,
                    smallest_weight,
                    vocab_size,
                    num_blocks,
                    BLOCK,
                    BLOCKS,
                )
            token_id = _draw_from_blocks(
                logits,
                largest + row * num_blocks,
                load_weights(weights, row, of_blocks, best, scale, num_blocks),
                best,
                scale,
                smallest_logit,
                smallest_weight,
                uniform,
                vocab_size,
                BLOCK,
            )
    tl.store(out + row, token_id)


@triton.jit
def _kept_weights(x, weigh_by, best, scale, smallest_logit, smallest_weight):
    """Weights by the logit `weigh_by`, 0 of what the filters drop."""
    kept = (x >= smallest_logit) & (tl.exp2((x - best) * scale) >= smallest_weight)
    return tl.where(kept, weigh(x, weigh_by, scale), 0)


@triton.jit
def _weigh_kept(
    logits,
    largest,
    weights,
    best,
    scale,
    bound,
    smallest_logit,
    smallest_weight,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Overwrite the blocks' sums of weights by those of what the filters keep, which reaches `bound`."""
    tl.debug_barrier()  # what was there has been read
    for start in range(0, num_blocks, BLOCKS):
        number, of_blocks, _, x = load_blocks(logits, largest, start, bound, vocab_size, num_blocks, BLOCK, BLOCKS)
        finite = tl.where(of_blocks == float("-inf"), 0.0, of_blocks)
        kept = _kept_weights(x, finite[:, None], best, scale, smallest_logit, smallest_weight)
        tl.store(weights + number, tl.sum(kept, 1), mask=number < num_blocks)
    tl.debug_barrier()


@triton.jit
def _target(total, uniform):
    """The token is the first at which the running sum of weights exceeds this, which is below `total`."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _draw_from_list(
    candidates,
    candidate_ids,
    found,
    best,
    scale,
    smallest_logit,
    smallest_weight,
    uniform,
    vocab_size,
    CANDIDATES: tl.constexpr,
):
    """The token of a list that is in no certain order: found by halving the vocabulary."""
    place = tl.arange(0, CANDIDATES)
    ids = tl.load(candidate_ids + place, mask=place < found, other=0)
    x = load_candidates(candidates, found, CANDIDATES)
    weights = _kept_weights(x, best, best, scale, smallest_logit, smallest_weight)
    target = _target(tl.sum(weights, 0), uniform)
    low = tl.full((), -1, tl.int32)
    high = low + vocab_size
    while high - low > 1:
        middle = (low + high) >> 1
        exceeds = tl.sum(tl.where(ids <= middle, weights, 0), 0) > target
        low = tl.where(exceeds, low, middle)
        high = tl.where(exceeds, middle, high)
    return high


@triton.jit
def _draw_from_blocks(
    logits,
    largest,
    block_weights,
    best,
    scale,
    smallest_logit,
    smallest_weight,
    uniform,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """The token by the weights [TILE] of the blocks; in its block, weights are those by its own largest logit."""
    running = tl.cumsum(block_weights, 0)
    target = _target(tl.sum(block_weights, 0), uniform)
    block = tl.sum((running <= target).to(tl.int32), 0)
    before = tl.max(tl.where(running <= target, running, 0), 0)

    of_block = tl.load(largest + block)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, ids, ids < vocab_size)
    kept = _kept_weights(x, of_block, best, scale, smallest_logit, smallest_weight)
    rest = (target - before).to(tl.float64) * tl.exp2((best - of_block) * scale).to(tl.float64)
    rest = tl.minimum(rest.to(tl.int64), tl.sum(kept, 0) - 1)
    return block * BLOCK + tl.sum((tl.cumsum(kept, 0) <= rest).to(tl.int32), 0)


@triton.jit(do_not_specialize=["top"])
def _log_probabilities(
    logits,
    token_ids,
    largest,
    weights,
    larger,
    chosen,
    top_ids,
    top_values,
    ranks,
    stride,
    vocab_size,
    num_blocks,
    top,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top_ids += row * top
    top_values += row * top
    of_blocks, any_nan = load_largest(largest, row, num_blocks, TILE)
    best = tl.max(of_blocks, 0)
    number = tl.arange(0, TILE)
    block_weights = load_weights(weights, row, of_blocks, best, exponent_scale(None, row), num_blocks)
    log_sum = tl.log(tl.sum(block_weights, 0).to(tl.float64) * (1.0 / UNIT)).to(tl.float32)
    numbers = is_finite(best, any_nan)
    best = tl.where(numbers, best, float("nan"))

    tl.store(chosen + row, load_logit(logits, tl.load(token_ids + row)) - best - log_sum)
    above = tl.load(larger + row * num_blocks + number, mask=number < num_blocks, other=0)
    tl.store(ranks + row, 1 + tl.sum(above, 0))

    # Ids are taken one by one, in the order of falling logits and rising ids; of each block `of_blocks` holds the
    # largest logit that is left.
    last = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), -1, tl.int32)
    for place in range(top):
        next_best = tl.max(of_blocks, 0)
        block = tl.min(tl.where(of_blocks == next_best, number, TILE), 0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(logits, ids, ids < vocab_size)
        left = (x == next_best) & ((x < last) | (ids > last_id))
        last_id = tl.min(tl.where(left, ids, vocab_size), 0)
        last = next_best
        tl.store(top_ids + place, tl.where(numbers, last_id, -1))
        tl.store(top_values + place, last - best - log_sum)
        left = (x < last) | ((x == last) & (ids > last_id))
        of_blocks = tl.where(number == block, tl.max(tl.where(left, x, float("-inf")), 0), of_blocks)


def argmax(
    logits: torch.Tensor, *, workspace: Workspace | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The best id [S] int32 of each row of `logits` [S, V] (float32, bfloat16 or float16), the lowest one of equals.

    -1 in rows with a NaN. The last axis of `logits` must be contiguous here and below; other rows may lie between.
    """
    num_rows, vocab_size, num_blocks = _shape(logits)
    space = workspace or Workspace.allocate(num_rows, vocab_size, logits.device)
    ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if out is None else out
    settings = choose("argmax", rows=num_rows, vocab=vocab_size)
    start_statistics(logits, space, settings["statistics"])
    launch(
        _best_ids,
        (num_rows,),
        logits,
        space.largest,
        ids,
        logits.stride(0),
        vocab_size,
        num_blocks,
        TILE=_tile(num_blocks),
        BLOCK=BLOCK,
        **settings["best"],
    )
    return ids


def choose_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token ids [S] int32 by temperature, filters and draw from `logits` [S, V] (float32, bfloat16 or float16).

    Settings, one a row: `temperature` float32, below 1e-5 is greedy; `top_k` int32 or int64, 0 is off; `top_p` float64
    or float32, 1 is off; `min_p` float32, 0 is off; `uniforms` float64 in (0, 1). A token is the first in vocabulary
    order at which the running sum of weights exceeds the uniform number times their total. -1 in rows with a NaN, and,
    where they aren't greedy, in those whose best logit is infinite.
    """
    num_rows, vocab_size, num_blocks = _shape(logits)
    space = workspace or Workspace.allocate(num_rows, vocab_size, logits.device)
    ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if out is None else out
    settings = choose("choose_tokens", rows=num_rows, vocab=vocab_size)
    start_statistics(logits, space, settings["statistics"], temperature=temperature)
    collect_candidates(logits, temperature, top_k, top_p, min_p, space, settings)
    launch(
        _choose_tokens,
        (num_rows,),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        uniforms,
        space.largest,
        space.weights,
        space.bounds,
        space.found,
        space.candidates,
        space.candidate_ids,
        ids,
        logits.stride(0),
        vocab_size,
        num_blocks,
        TILE=_tile(num_blocks),
        BLOCK=BLOCK,
        CANDIDATES=space.candidates.shape[1],
        fp_fusion=False,
        **settings["choose"],
    )
    return ids


def log_probabilities(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    top: int,
    workspace: Workspace | None = None,
    out: LogProbabilities | None = None,
) -> LogProbabilities:
    """Of `logits` [S, V] as they stand: what they say of `token_ids` [S] (int32 or int64), and the `top` best ids.

    `top` is at most 128. Of a negative token id the log-probability is NaN. Rows with a NaN, or whose best logit is
    infinite, have NaN for all log-probabilities, and -1 for the best ids.
    """
    num_rows, vocab_size, num_blocks = _shape(logits)
    assert top <= MOST_LOGPROBS
    space = workspace or Workspace.allocate(num_rows, vocab_size, logits.device)
    found = out or LogProbabilities.allocate(num_rows, top, logits.device)
    settings = choose("log_probabilities", rows=num_rows, vocab=vocab_size)
    start_statistics(logits, space, settings["statistics"], token_ids=token_ids)
    launch(
        _log_probabilities,
        (num_rows,),
        logits,
        token_ids,
        space.largest,
        space.weights,
        space.larger,
        *found,
        logits.stride(0),
        vocab_size,
        num_blocks,
        top,
        TILE=_tile(num_blocks),
        BLOCK=BLOCK,
        fp_fusion=False,
        **settings["best"],
    )
    return found


def _shape(logits: torch.Tensor) -> tuple[int, int, int]:
    """(Rows, ids, blocks of ids)."""
    num_rows, vocab_size = logits.shape
    return num_rows, vocab_size, cdiv(vocab_size, BLOCK)


def _tile(num_blocks: int) -> int:
    return triton.next_power_of_2(num_blocks)
