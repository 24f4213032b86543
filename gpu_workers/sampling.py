"""From logits to tokens on a CPU, for all sampling rows of a step at once.

The order of operations, which clients can see in the results: logit bias; ids that are not allowed, are banned before
`min_tokens`, or would complete a bad word; the repetition, then frequency and presence penalties; (log-probabilities
are reported of what stands here;) the grammar's mask; temperature; top-k; top-p; min-p; one draw by inverse CDF in
vocabulary order.

Each operation treats every row by itself and in the same way whatever the other rows are, so a row's token has the same
bits alone and in a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from gpu_workers.noise import uniform
from ipc.engine_messages import RawLogprobs

GREEDY_BELOW = 1e-5  # a temperature below this is greedy
NOT_NUMBERS = "the model computed logits that are not numbers (NaN)"
_TOP_P_CANDIDATES = 1024  # enough for nearly every distribution; where it is not, all are sorted
_DRAW_BLOCK = 512  # ids
_INFINITY = np.uint32(0x7F800000)  # as a float32 (IEEE 754)
_ELEMENTS = 1 << 19  # logits drawn from at once: few enough for the caches, and to be spared fresh pages each step

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.integer]


@dataclass(slots=True, frozen=True)
class LogitEdit:
    """Single logits to be changed: E pairs of an index into the batch and a token id, no pair twice."""

    rows: IntArray  # [E]
    ids: IntArray  # [E]


@dataclass(slots=True, frozen=True)
class Bias(LogitEdit):
    values: FloatArray  # [E], added


@dataclass(slots=True, frozen=True)
class Penalties(LogitEdit):
    """The distinct tokens of prompt and output of each row with a penalty."""

    counts: FloatArray  # [E], how often the id occurs in the output; 0: in the prompt only
    repetition: FloatArray  # [E], as are the next two
    presence: FloatArray
    frequency: FloatArray


@dataclass(slots=True, frozen=True)
class SamplingBatch:
    """What the S sampling rows of one step ask for."""

    temperature: NDArray[np.float32]  # [S]
    top_k: NDArray[np.int64]  # [S], 0: off
    top_p: NDArray[np.float64]  # [S]
    min_p: NDArray[np.float32]  # [S]
    seeds: NDArray[np.uint64]  # [S]
    output_index: NDArray[np.int64]  # [S], of the token to be drawn
    logprobs: NDArray[np.int64]  # [S], -1: none, k: those of the token and of the k best
    bias: Bias | None = None
    banned: LogitEdit | None = None
    allowed: Mapping[int, IntArray] | None = None  # by index into the batch: the ids besides which nothing is possible
    penalties: Penalties | None = None


Chooser = Callable[[torch.Tensor, SamplingBatch], NDArray[np.int64]]


@dataclass(slots=True, frozen=True)
class TokenMask:
    """What grammars allow in R of the sampling rows."""

    rows: NDArray[np.int64]  # [R], ascending
    limits: NDArray[np.float32]  # [R, V], the largest logit that a token may have: infinity, or minus infinity


@dataclass(slots=True, frozen=True)
class PackedMask:
    """The same, for who wants it on a device."""

    rows: NDArray[np.int64]  # [R], ascending
    bits: NDArray[np.int32]  # [R, words of 32]: bit i of word j is set where token 32 j + i may come next


def limits_of(bits: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
    """[R, V] of `TokenMask`, from the bits of a `PackedMask`."""
    # The two differ in their sign bit.
    signs = np.unpackbits(~bits.view(np.uint8), axis=1, bitorder="little").astype(np.uint32)
    signs <<= 31
    signs |= _INFINITY
    return signs.view(np.float32)[:, :vocab_size]


def argmax(logits: torch.Tensor) -> NDArray[np.int64]:
    """The best id of each row of [S, V] float32, the lowest one of equals. Raises FloatingPointError on NaN."""
    array = logits.numpy()
    ids: NDArray[np.int64] = array.argmax(axis=-1)  # vectorised, about twenty times as fast as torch's
    _require_numbers(array[np.arange(len(ids)), ids])
    return ids


def sample(
    logits: torch.Tensor, batch: SamplingBatch, mask: TokenMask | None = None, choose: Chooser | None = None
) -> tuple[NDArray[np.int64], tuple[RawLogprobs | None, ...]]:
    """Token ids [S] and log-probabilities (empty, or S entries) from logits [S, V] float32, which are overwritten.

    `choose` is another implementation of `choose_tokens`. The id is -1 in rows of the mask in which no token is left.
    Raises FloatingPointError when the logits contain NaN.
    """
    edit_logits(logits, batch)
    asked = np.flatnonzero(batch.logprobs >= 0)
    table = torch.log_softmax(_select(logits, asked), dim=-1).numpy() if len(asked) else None
    impossible = _apply_mask(logits, mask) if mask is not None else ()
    token_ids = (choose or choose_tokens)(logits, batch)
    logprobs = () if table is None else _logprobs(table, asked, batch.logprobs, token_ids)
    token_ids[list(impossible)] = -1
    return token_ids, logprobs


def _apply_mask(logits: torch.Tensor, mask: TokenMask) -> Sequence[int]:
    """Make what the mask forbids impossible, in place; the rows in which nothing is left, whose logits become 0."""
    rows = mask.rows.tolist()
    array = logits.numpy()
    for row, limits in zip(rows, mask.limits, strict=True):
        np.minimum(array[row], limits, out=array[row])
    impossible = [row for row in rows if array[row].max() == -np.inf]
    logits[impossible] = 0.0
    return impossible


def choose_tokens(logits: torch.Tensor, batch: SamplingBatch) -> NDArray[np.int64]:
    """Token ids [S] by temperature, filters and draw, of logits [S, V] float32. Raises FloatingPointError on NaN."""
    drawn = batch.temperature >= GREEDY_BELOW
    if not drawn.any():
        return argmax(logits)
    token_ids = np.empty(len(drawn), dtype=np.int64)
    greedy = np.flatnonzero(~drawn)
    if len(greedy):
        token_ids[greedy] = argmax(_select(logits, greedy))
    random = np.flatnonzero(drawn)
    at_once = max(1, _ELEMENTS // logits.shape[1])
    for start in range(0, len(random), at_once):
        rows = random[start : start + at_once]
        weights = filtered_probabilities(logits, batch, rows)
        token_ids[rows] = _draw(weights, uniform(batch.seeds[rows], batch.output_index[rows]))
    return token_ids


def edit_logits(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Apply bias, limits, bans and penalties in place.

    The repetition penalty (Keskar et al. 2019, CTRL) divides positive logits and multiplies negative ones of ids in
    prompt or output; frequency and presence (OpenAI) subtract per occurrence and once, looking at the output only.
    """
    if (bias := batch.bias) is not None:
        where = _index(bias)
        logits[where] = logits[where] + torch.from_numpy(bias.values)
    for row, ids in (batch.allowed or {}).items():
        kept = torch.from_numpy(ids)
        values = logits[row, kept]
        logits[row] = -torch.inf
        logits[row, kept] = values
    if batch.banned is not None:
        logits[_index(batch.banned)] = -torch.inf
    if (penalties := batch.penalties) is not None:
        where = _index(penalties)
        counts, repetition, presence, frequency = (
            torch.from_numpy(column)
            for column in (penalties.counts, penalties.repetition, penalties.presence, penalties.frequency)
        )
        values = logits[where]
        values = torch.where(values < 0, values * repetition, values / repetition)
        # Products and differences apart: fused, their last bit would depend on where in the vector an entry stands.
        values = values - frequency * counts
        values = values - presence * (counts > 0)
        logits[where] = values


def _index(edit: LogitEdit) -> tuple[torch.Tensor, torch.Tensor]:
    rows, ids = edit.rows.astype(np.int64), edit.ids.astype(np.int64)
    return torch.from_numpy(rows), torch.from_numpy(ids)


def filtered_probabilities(logits: torch.Tensor, batch: SamplingBatch, rows: IntArray) -> torch.Tensor:
    """Weights [R, V] float32 of the given R rows of `logits`, zero outside top-k, top-p and min-p; not normalised.

    Among equals at the edge of top-k or top-p all are kept, so the outcome depends on no sorting order.
    """
    vocab_size = logits.shape[1]
    temperature = torch.from_numpy(batch.temperature[rows, None])
    scaled = _select(logits, rows) / temperature

    top_k = batch.top_k[rows]
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    if len(limited):
        ranks = torch.from_numpy(top_k[limited, None] - 1)
        smallest = torch.full_like(temperature, -torch.inf)
        best = _descending(_select(scaled, limited), int(top_k[limited].max()))
        smallest[torch.from_numpy(limited)] = best.gather(1, ranks)
        _fill_below(scaled, smallest, -torch.inf)

    weights = torch.softmax(scaled, dim=-1)

    top_p, min_p = batch.top_p[rows], batch.min_p[rows]
    if (top_p < 1).any() or (min_p > 0).any():
        smallest = weights.amax(dim=-1, keepdim=True) * torch.from_numpy(min_p[:, None])
        limited = np.flatnonzero(top_p < 1)
        if len(limited):
            some = torch.from_numpy(limited)
            of_top_p = _top_p_threshold(_select(weights, limited), torch.from_numpy(top_p[limited, None]))
            smallest[some] = torch.maximum(smallest[some], of_top_p)
        _fill_below(weights, smallest, 0.0)
    return weights


def _select(values: torch.Tensor, rows: IntArray) -> torch.Tensor:
    """The given rows, in ascending order and none twice; `values` itself when these are all."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, torch.from_numpy(rows))


def _fill_below(values: torch.Tensor, smallest: torch.Tensor, fill: float) -> None:
    """Write `fill` where values [R, V] lie below their row's `smallest` [R, 1]."""
    array = values.numpy()
    array[array < smallest.numpy()] = fill  # three times as fast as masked_fill_


def _descending(values: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each row of [R, V], largest first."""
    array = values.numpy()
    if k < array.shape[1]:
        array = np.partition(array, array.shape[1] - k, axis=-1)[:, -k:]
    return torch.from_numpy(np.sort(array, axis=-1)).flip(-1)


def _top_p_threshold(
    probabilities: torch.Tensor, top_p: torch.Tensor, candidates: int = _TOP_P_CANDIDATES
) -> torch.Tensor:
    """The smallest probability kept, [R, 1]: that of the last of the fewest best tokens whose mass reaches top_p.

    Nucleus sampling of Holtzman et al. 2020. `probabilities` is [R, V] float32, `top_p` [R, 1] float64.
    """
    vocab_size = probabilities.shape[1]
    k = min(candidates, vocab_size)
    best = _descending(probabilities, k)
    mass = best.cumsum(dim=-1, dtype=torch.float64)
    smallest = best.gather(1, torch.searchsorted(mass, top_p).clamp(max=k - 1))
    wider = torch.nonzero(mass[:, -1] < top_p[:, 0])[:, 0]
    if k < vocab_size and len(wider):
        smallest[wider] = _top_p_threshold(probabilities.index_select(0, wider), top_p[wider], vocab_size)
    return smallest


def _draw(weights: torch.Tensor, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Inverse CDF in vocabulary order: the first id at which the cumulated weight exceeds u times the total.

    The running sum is float64, first over blocks of ids and then inside the block that was hit: over the whole
    vocabulary it would take longer, and twice the memory of the weights. A block's own sum is float32, as they are.
    """
    if weights.shape[1] % _DRAW_BLOCK:
        weights = pad(weights, (0, -weights.shape[1] % _DRAW_BLOCK))
    blocks = weights.view(len(weights), -1, _DRAW_BLOCK)
    cumulated = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    _require_numbers(cumulated[:, -1].numpy())
    targets = torch.from_numpy(uniforms[:, None]) * cumulated[:, -1:]
    hit = torch.searchsorted(cumulated, targets, right=True)
    before = pad(cumulated, (1, 0)).gather(1, hit)
    inside = blocks.gather(1, hit[:, :, None].expand(-1, -1, _DRAW_BLOCK))[:, 0]
    offset = torch.searchsorted(inside.cumsum(dim=-1, dtype=torch.float64) + before, targets, right=True)
    # The running sum in the block may end a little below the one that chose it: then its last possible id is meant.
    last = (torch.arange(_DRAW_BLOCK) * (inside > 0)).amax(dim=-1, keepdim=True)
    token_ids: NDArray[np.int64] = (hit * _DRAW_BLOCK + torch.minimum(offset, last))[:, 0].numpy()
    return token_ids


def _logprobs(
    table: FloatArray, asked: IntArray, wanted: NDArray[np.int64], token_ids: NDArray[np.int64]
) -> tuple[RawLogprobs | None, ...]:
    """Of each of the `asked` rows, whose log-probabilities are those of `table`."""
    found: list[RawLogprobs | None] = [None] * len(wanted)
    for i, values in zip(asked, table, strict=True):
        best = best_ids(values, int(wanted[i]))
        found[i] = RawLogprobs(
            chosen=float(values[token_ids[i]]),
            top_ids=best.astype("<i4").tobytes(),
            top_values=values[best].astype("<f4").tobytes(),
        )
    return tuple(found)


def best_ids(values: FloatArray, k: int) -> NDArray[np.int64]:
    """The ids [k] of the largest of the values [V], largest first; of equals the lowest id, as the greedy choice."""
    if not k:
        return np.empty(0, dtype=np.int64)
    smallest = np.partition(values, len(values) - k)[-k]
    candidates = np.flatnonzero(values >= smallest)
    best: NDArray[np.int64] = candidates[np.argsort(-values[candidates], kind="stable")][:k]
    return best


def _require_numbers(values: FloatArray) -> None:
    if np.isnan(values).any():
        raise FloatingPointError(NOT_NUMBERS)
