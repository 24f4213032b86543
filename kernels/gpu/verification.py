"""Speculative verification: how many of the drafts of each sequence are kept, and which token comes after them.

The target draws its own token at each position, with that position's noise (`gpu_workers.noise`: it depends on the
request's seed and the index of the output token alone), and drafts are kept while they equal it. So the output is token
by token that of the target without drafts, and has the target's distribution whatever the drafts are. Rejection
sampling (Leviathan et al. 2023) has the same distribution, but not the same tokens.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.tables import choose


@triton.jit
def _verify(target_ids, draft_ids, num_drafts, accepted, next_token, COUNTS: tl.constexpr, DRAFTS: tl.constexpr):
    sequence = tl.program_id(0)
    before = tl.zeros((COUNTS,), tl.int32)
    for first in range(0, sequence, COUNTS):
        other = first + tl.arange(0, COUNTS)
        before += tl.load(num_drafts + other, mask=other < sequence, other=0)
    drafts_at = tl.sum(before, 0)
    targets_at = drafts_at + sequence

    count = tl.load(num_drafts + sequence)
    kept = count
    for first in range(0, count, DRAFTS):
        place = first + tl.arange(0, DRAFTS)
        draft = tl.load(draft_ids + drafts_at + place, mask=place < count, other=0)
        target = tl.load(target_ids + targets_at + place, mask=place < count, other=0)
        kept = tl.minimum(kept, tl.min(tl.where(draft != target, place, count), 0))
    tl.store(accepted + sequence, kept)
    tl.store(next_token + sequence, tl.load(target_ids + targets_at + kept))


def verify(
    target_ids: torch.Tensor,
    draft_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    *,
    accepted: torch.Tensor | None = None,
    next_token: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Number of drafts kept, the target's token after them), both [B] int32, of B sequences.

    `num_drafts` [B] int32: k of each sequence; `draft_ids` [sum of k] and `target_ids` [sum of k + 1] int32, sequence
    after sequence: the target's token at the position of each draft, given the drafts before it, and after the last.
    A target id of -1, where none could be drawn, equals no draft, and so is returned as the next token.
    """
    num_sequences = len(num_drafts)
    if accepted is None:
        accepted = torch.empty(num_sequences, dtype=torch.int32, device=target_ids.device)
    if next_token is None:
        next_token = torch.empty(num_sequences, dtype=torch.int32, device=target_ids.device)
    launch(
        _verify,
        (num_sequences,),
        target_ids,
        draft_ids,
        num_drafts,
        accepted,
        next_token,
        **choose("verify", sequences=num_sequences),
    )
    return accepted, next_token
