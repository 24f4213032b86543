"""Rows of the embedding table, and the input ids of a step."""

import torch
import torch.nn.functional as F

from kernels.gpu.embedding import embed, input_ids
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.rows import MODELS, Model, block_candidates, normal

_SEQUENCES = 256


def cases() -> list[Case]:
    return [_embed(model, tokens) for model in MODELS for tokens in (64, 8192)] + [
        _input_ids(tokens) for tokens in (64, 8192)
    ]


def _embed(model: Model, tokens: int) -> Case:
    def prepare(device: torch.device, seed: int) -> Prepared:
        table = normal(device, seed, model.vocabulary, model.hidden)
        token_ids = _integers(device, seed, tokens, 0, model.vocabulary)
        out = torch.empty(tokens, model.hidden, dtype=table.dtype, device=device)
        rival = (lambda: F.embedding(token_ids, table)) if device.type == "cuda" else None
        return Prepared(lambda: embed(table, token_ids, out=out), lambda: table[token_ids.long()].float(), rival)

    return Case(
        kernel="embed",
        name=f"{model.name} {model.vocabulary} x {model.hidden}, {tokens} tokens",
        shape={"width": model.hidden},
        prepare=prepare,
        num_bytes=tokens * (model.hidden * 4 + 4),
        rival="torch",
        tolerance=0.0,
        candidates=block_candidates(model.hidden, (512, 1024, 2048, 4096, 8192), (4, 32)),
    )


def _input_ids(tokens: int) -> Case:
    def prepare(device: torch.device, seed: int) -> Prepared:
        token_ids = _integers(device, seed, tokens, -1000, 1000)
        rows = _integers(device, seed + 1, tokens, 0, _SEQUENCES)
        last_tokens = _integers(device, seed + 2, _SEQUENCES, 0, 1000)
        out = torch.empty_like(token_ids)
        return Prepared(
            lambda: input_ids(token_ids, rows, last_tokens, out),
            lambda: torch.where(token_ids < 0, last_tokens[rows.long()], token_ids).float(),
        )

    return Case(
        kernel="input_ids",
        name=f"{tokens} tokens",
        shape={"tokens": tokens},
        prepare=prepare,
        num_bytes=tokens * 12,
        tolerance=0.0,
        candidates=block_candidates(tokens, (64, 128, 256, 512, 1024), (1, 4)),
    )


def _integers(device: torch.device, seed: int, count: int, low: int, high: int) -> torch.Tensor:
    """[count] int32 from `low` to below `high`; on "meta" there are none."""
    if device.type == "meta":
        return torch.empty(count, dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(low, high, (count,), generator=generator, dtype=torch.int32, device=device)
