"""From token ids to hidden states, the ids of tokens that are known on the device only included."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import cdiv, launch
from kernels.gpu.tables import choose


@triton.jit
def _embed(table, token_ids, out, table_row, out_row, first, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token).to(tl.int64) - first
    width = tl.where((row >= 0) & (row < rows), WIDTH, 0)
    state = tl.load(table + row * table_row + at, mask=at < width, other=0.0)
    tl.store(out + token * out_row + at, state, mask=at < WIDTH)


def embed(
    table: torch.Tensor, token_ids: torch.Tensor, *, first: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, hidden]: for each of `token_ids` [T] (int32 or int64) row id - first of `table`, or zeros where it has none.

    `table` [rows, hidden] is a rank's part of the vocabulary, the one that begins with id `first`.
    """
    tokens, width = token_ids.shape[0], table.shape[1]
    if out is None:
        out = table.new_empty((tokens, width))
    settings = choose("embed", width=width)
    launch(
        _embed,
        (tokens * cdiv(width, settings["BLOCK"]),),
        table,
        token_ids,
        out,
        table.stride(0),
        out.stride(0),
        first,
        table.shape[0],
        WIDTH=width,
        BLOCK=settings["BLOCK"],
        num_warps=settings["num_warps"],
    )
    return out


@triton.jit
def _input_ids(token_ids, rows, last_tokens, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + at, mask=at < count, other=0)
    sampled = (at < count) & (token < 0)
    row = tl.load(rows + at, mask=sampled, other=0)
    token = tl.where(sampled, tl.load(last_tokens + row, mask=sampled, other=0), token)
    tl.store(out + at, token, mask=at < count)


def input_ids(
    token_ids: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Fill `out` [T] with `token_ids` [T], and where those are negative with `last_tokens` [sequences] at `rows` [T].

    All int32. The negative ones are tokens that the previous step has sampled, which the host does not know yet.
    """
    count = token_ids.shape[0]
    settings = choose("input_ids", tokens=count)
    launch(
        _input_ids,
        (cdiv(count, settings["BLOCK"]),),
        token_ids,
        rows,
        last_tokens,
        out,
        count,
        BLOCK=settings["BLOCK"],
        num_warps=settings["num_warps"],
    )
    return out
