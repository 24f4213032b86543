"""The input of one forward: a mixed batch of prefill chunks and decode rows, flattened to one axis of tokens."""

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class ForwardBatch:
    """T tokens of B sequences; sequence i owns the flat tokens `query_starts[i]:query_starts[i + 1]`.

    The attention of a token at position p covers no more than the positions 0..p of its own sequence: those before the
    chunk are already in the KV pool, those of the chunk are written by this forward before they are read.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position of each token in its sequence
    slots: torch.Tensor  # [T] int64, where each token's K and V go: block id * block_size + offset
    query_starts: list[int]  # [B + 1]
    context_lens: list[int]  # [B], positions in the pool once this forward is done (chunk included)
    block_tables: torch.Tensor  # [B, max blocks] int32, ids of each sequence's blocks in order; the rest is undefined
    logits_rows: torch.Tensor  # [S] int64, the flat tokens whose logits are wanted
