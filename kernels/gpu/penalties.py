"""Changes of logits in place before a token is chosen: bias, bans, penalties, and the bit masks of grammars.

What they mean and in which order they come is defined by `gpu_workers.sampling`. Single logits are given as E entries
of a row and a token id, no pair twice; an entry with a negative row is skipped, so that a graph can be replayed with
fewer entries than it was captured with. How many there are is no reason to compile a kernel again. Logits are [S, V]
float32; their last axis must be contiguous.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import cdiv, launch
from kernels.gpu.tables import choose

_WORD = tl.constexpr(32)  # ids in a word of a mask


@triton.jit
def _entries(logits, rows, ids, stride, num_entries, ENTRIES: tl.constexpr):
    """Of one program's entries: their places, where their logits lie, and which of them there are."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    row = tl.load(rows + at, mask=at < num_entries, other=-1).to(tl.int64)
    token_id = tl.load(ids + at, mask=at < num_entries, other=0)
    return at, logits + row * stride + token_id, row >= 0


@triton.jit(do_not_specialize=["num_entries"])
def _penalize(logits, rows, ids, counts, repetition, presence, frequency, stride, num_entries, ENTRIES: tl.constexpr):
    at, pointers, there = _entries(logits, rows, ids, stride, num_entries, ENTRIES)
    x = tl.load(pointers, mask=there, other=0.0)
    count = tl.load(counts + at, mask=there, other=0.0)
    factor = tl.load(repetition + at, mask=there, other=1.0)
    x = tl.where(x < 0, x * factor, tl.div_rn(x, factor))
    # Started without fusion: each product and each difference is rounded, as by `edit_logits`.
    x = x - tl.load(frequency + at, mask=there, other=0.0) * count
    x = x - tl.load(presence + at, mask=there, other=0.0) * (count > 0).to(tl.float32)
    tl.store(pointers, x, mask=there)


@triton.jit(do_not_specialize=["num_entries"])
def _add_bias(logits, rows, ids, values, stride, num_entries, ENTRIES: tl.constexpr):
    at, pointers, there = _entries(logits, rows, ids, stride, num_entries, ENTRIES)
    x = tl.load(pointers, mask=there, other=0.0)
    tl.store(pointers, x + tl.load(values + at, mask=there, other=0.0), mask=there)


@triton.jit(do_not_specialize=["num_entries"])
def _ban(logits, rows, ids, stride, num_entries, ENTRIES: tl.constexpr):
    _, pointers, there = _entries(logits, rows, ids, stride, num_entries, ENTRIES)
    tl.store(pointers, float("-inf"), mask=there)


@triton.jit
def _apply_bitmask(
    logits, bitmask, rows, empty, stride, mask_stride, vocab_size, WORD: tl.constexpr, WORDS: tl.constexpr
):
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    if row >= 0:
        word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        bits = tl.load(bitmask + index * mask_stride + word, mask=word * WORD < vocab_size, other=0)
        ids = word[:, None] * WORD + tl.arange(0, WORD)[None, :]
        allowed = ((bits[:, None] >> tl.arange(0, WORD)[None, :]) & 1) != 0
        pointers = logits + row * stride + ids
        there = ids < vocab_size
        tl.store(pointers, float("-inf"), mask=there & (allowed == 0))
        # A NaN is left where it is: whoever chooses from the row has to see it.
        x = tl.load(pointers, mask=there & allowed, other=float("-inf"))
        left = (x != float("-inf")).to(tl.int32)
        if tl.max(tl.max(left, 1), 0) > 0:
            tl.store(empty + index, 0)
    else:
        tl.store(empty + index, 0)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """The repetition penalty (Keskar et al. 2019, CTRL), then frequency and presence (OpenAI), of E logits.

    `rows` and `ids` [E] int32 or int64; [E] float32 each: `counts`, how often the id occurs in the output, and the
    penalties. The logits get the same bits as from `gpu_workers.sampling.edit_logits`.
    """
    _edit(_penalize, logits, rows, ids, counts, repetition, presence, frequency)


def apply_bias(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values` [E] float32 to E logits."""
    _edit(_add_bias, logits, rows, ids, values)


def ban(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """Make E tokens impossible."""
    _edit(_ban, logits, rows, ids)


def _edit(kernel: Any, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, *columns: torch.Tensor) -> None:
    num_entries = len(rows)
    settings = choose("edit_logits", entries=num_entries)
    launch(
        kernel,
        (cdiv(num_entries, settings["ENTRIES"]),),
        logits,
        rows,
        ids,
        *columns,
        logits.stride(0),
        num_entries,
        fp_fusion=False,
        **settings,
    )


def apply_bitmask(
    logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor, *, empty: torch.Tensor | None = None
) -> torch.Tensor:
    """Make all tokens impossible whose bit is not set; returns `empty` [R] int32, 1 where a row has no token left.

    `bitmask` [R, ceil(V / 32) or more] int32, bit i % 32 of word i // 32 for id i (the layout of llguidance and
    xgrammar); `rows` [R] int32 or int64, the rows of `logits` that the masks are for. A mask whose row is negative is
    skipped, and not empty. A row with an allowed NaN is not empty either.
    """
    num_masks, vocab_size = len(rows), logits.shape[1]
    if empty is None:
        empty = torch.ones(num_masks, dtype=torch.int32, device=logits.device)
    else:
        empty.fill_(1)
    settings = choose("apply_bitmask", rows=num_masks, vocab=vocab_size)
    launch(
        _apply_bitmask,
        (cdiv(vocab_size, _WORD.value * settings["WORDS"]), num_masks),
        logits,
        bitmask,
        rows,
        empty,
        logits.stride(0),
        bitmask.stride(0),
        vocab_size,
        WORD=_WORD.value,
        **settings,
    )
    return empty
