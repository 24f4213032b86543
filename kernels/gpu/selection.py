"""Finding the limits of top-k and top-p in one row of logits without sorting it: device functions of the sampler.

What is known of the row's blocks bounds the limit from below. The logits from the bound on, the candidates, are
gathered in a list; among them the limit is found exactly, by bisection over the bits of the floats. Only where the list
is too short for them, the bound, and what is above the limit for sure, are first brought closer by passes over the row.

For the words and the unit of weights see `kernels.gpu.block_statistics`.
"""

import triton
import triton.language as tl

from kernels.gpu.block_statistics import load_logits, weigh

_BOUND_STEPS = tl.constexpr(12)  # leave 44 / 2^12 of an exponent of 2
_LINEAR_STEPS = tl.constexpr(32)


@triton.jit
def smallest_weighed(best, scale):
    """A logit that all logits with a weight above 0 reach."""
    return best - tl.div_rn(tl.full((), 44.0, tl.float32), scale)


@triton.jit
def bound_limit(largest, block_weights, best, scale, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """A logit t, close to the largest, from which on the logits surely are `wanted` (COUNT) or weigh `wanted` (else).

    `largest`, `block_weights` [TILE] are those of the blocks. Where there is no such t, `smallest_weighed`.
    """
    low = smallest_weighed(best, scale)
    high = best
    # A block whose largest logit is t or more has one such logit, and weighs what it weighs but for logits below t.
    if COUNT:
        at_least = tl.full(largest.shape, 1, tl.int64)
    else:
        at_least = weigh(largest, best, scale)
        surely = block_weights - (block_weights >> 16) - BLOCK  # single logits' weights are rounded otherwise
    for _ in range(_BOUND_STEPS):
        middle = 0.5 * low + 0.5 * high
        of_blocks = at_least
        if not COUNT:
            of_blocks = tl.maximum(at_least, surely - BLOCK * weigh(middle, best, scale))
        reached = tl.sum(tl.where(largest >= middle, of_blocks, 0), 0) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def load_blocks(logits, largest, start, low, vocab_size, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """(Numbers, largest logits [BLOCKS], ids, logits [BLOCKS, BLOCK]) of the blocks from number `start` on.

    The logits are -inf in blocks without any from `low` on.
    """
    number = start + tl.arange(0, BLOCKS)
    of_blocks = tl.load(largest + number, mask=number < num_blocks, other=float("-inf"))
    ids = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = load_logits(logits, ids, (of_blocks >= low)[:, None] & (ids < vocab_size))
    return number, of_blocks, ids, x


@triton.jit
def write_candidates(x, ids, inside, start, candidates, candidate_ids, CANDIDATES: tl.constexpr):
    """Append those `inside` [BLOCKS, BLOCK] to the list, of which `start` are there already, as far as it goes."""
    counts = tl.sum(inside.to(tl.int32), 1)
    place = start + (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(inside.to(tl.int32), 1) - 1
    tl.store(candidates + place, x, mask=inside & (place < CANDIDATES))
    tl.store(candidate_ids + place, ids, mask=inside & (place < CANDIDATES))


@triton.jit
def load_candidates(candidates, found, CANDIDATES: tl.constexpr):
    """[CANDIDATES] logits, -inf beyond those that were found."""
    place = tl.arange(0, CANDIDATES)
    return tl.load(candidates + place, mask=place < found, other=float("-inf"))


@triton.jit
def count_and_weigh(
    logits, largest, limit, best, scale, vocab_size, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """(Number int32, weight int64) of the row's logits that reach `limit`: a pass over it."""
    counts = tl.zeros((BLOCKS, BLOCK), tl.int32)
    weights = tl.zeros((BLOCKS, BLOCK), tl.int64)
    for start in range(0, num_blocks, BLOCKS):
        _, _, _, x = load_blocks(logits, largest, start, limit, vocab_size, num_blocks, BLOCK, BLOCKS)
        counts += (x >= limit).to(tl.int32)
        weights += tl.where(x >= limit, weigh(x, best, scale), 0)
    return tl.sum(tl.sum(counts, 1), 0), tl.sum(tl.sum(weights, 1), 0)


@triton.jit
def find_limits(
    logits,
    top_k,
    top_p,
    min_p,
    total,
    largest,
    best,
    scale,
    bound,
    found,
    candidates,
    candidate_ids,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """(Smallest logit, smallest weight, the largest being 1) that the filters keep."""
    smallest_logit = tl.full((), float("-inf"), tl.float32)
    smallest_weight = tl.minimum(min_p, 1.0)
    if (top_k > 0) & (top_k < vocab_size):
        bound = _find_limit(
            logits,
            largest,
            best,
            scale,
            top_k,
            bound,
            candidates,
            candidate_ids,
            found,
            vocab_size,
            num_blocks,
            True,
            BLOCK,
            BLOCKS,
            CANDIDATES,
        )
        smallest_logit = bound
        if top_p < 1:
            _, total = count_and_weigh(logits, largest, bound, best, scale, vocab_size, num_blocks, BLOCK, BLOCKS)
    if top_p < 1:
        limit = _find_limit(
            logits,
            largest,
            best,
            scale,
            weight_of_top_p(top_p, total),
            bound,
            candidates,
            candidate_ids,
            found,
            vocab_size,
            num_blocks,
            False,
            BLOCK,
            BLOCKS,
            CANDIDATES,
        )
        smallest_weight = tl.maximum(smallest_weight, tl.exp2((limit - best) * scale))
    return smallest_logit, smallest_weight


@triton.jit
def weight_of_top_p(top_p, total):
    """What the tokens that top-p keeps weigh at least; they are one at least."""
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _find_limit(
    logits,
    largest,
    best,
    scale,
    wanted,
    low,
    candidates,
    candidate_ids,
    found,
    vocab_size,
    num_blocks,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The largest logit t such that the logits from t on are `wanted` (COUNT) or weigh `wanted` (else) at least.

    `low` where even those from it on are, or weigh, less. `found` logits reach `low`, or a lower bound; the list holds
    all of them where that many fit, and is overwritten where not.
    """
    from_low = found
    from_high = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int64)  # the number or weight of the logits from `high` on
    low_key = _key(low)
    high_key = _key(best) + 1
    if found > CANDIDATES:
        step = 0
        while (from_low - from_high > CANDIDATES) & (high_key - low_key > 1):
            # Logits are spread more evenly over numbers than over floats, but only the latter are halved for sure.
            middle = (low_key + high_key) >> 1
            if step < _LINEAR_STEPS:
                middle = _key(0.5 * _value(low_key) + 0.5 * _value(high_key))
            middle = tl.minimum(tl.maximum(middle, low_key + 1), high_key - 1)
            count, weight = count_and_weigh(
                logits, largest, _value(middle), best, scale, vocab_size, num_blocks, BLOCK, BLOCKS
            )
            if COUNT:
                weight = count.to(tl.int64)
            reached = weight >= wanted
            low_key = tl.where(reached, middle, low_key)
            from_low = tl.where(reached, count, from_low)
            high_key = tl.where(reached, high_key, middle)
            from_high = tl.where(reached, from_high, count)
            above = tl.where(reached, above, weight)
            step += 1
        found = _collect_between(
            logits,
            largest,
            _value(low_key),
            _value(high_key),
            candidates,
            candidate_ids,
            vocab_size,
            num_blocks,
            BLOCK,
            BLOCKS,
            CANDIDATES,
        )

    # More than fit are found here only where all are equal: then there is nothing left to halve.
    x = load_candidates(candidates, found, CANDIDATES)
    if COUNT:
        weights = tl.full((CANDIDATES,), 1, tl.int64)
    else:
        weights = weigh(x, best, scale)
    while high_key - low_key > 1:
        middle = (low_key + high_key) >> 1
        reached = above + tl.sum(tl.where(x >= _value(middle), weights, 0), 0) >= wanted
        low_key = tl.where(reached, middle, low_key)
        high_key = tl.where(reached, high_key, middle)
    return _value(low_key)


@triton.jit
def _collect_between(
    logits,
    largest,
    low,
    high,
    candidates,
    candidate_ids,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Make the list anew, of the row's logits low <= x < high; how many they are."""
    found = tl.full((), 0, tl.int32)
    tl.debug_barrier()  # what was in the list has been read
    for start in range(0, num_blocks, BLOCKS):
        _, _, ids, x = load_blocks(logits, largest, start, low, vocab_size, num_blocks, BLOCK, BLOCKS)
        inside = (x >= low) & (x < high)
        write_candidates(x, ids, inside, found, candidates, candidate_ids, CANDIDATES)
        found += tl.sum(tl.sum(inside.to(tl.int32), 1), 0)
    tl.debug_barrier()
    return found


@triton.jit
def _key(x):
    """float32 -> int64 in the same order, neighbours to neighbours."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 that `_key` made `key` of."""
    folded = key.to(tl.int32)
    return (folded ^ ((folded >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
