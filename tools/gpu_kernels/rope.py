"""Rotation of queries and keys, and the write to KV pools of each dtype."""

from itertools import product

import torch

from kernels import reference
from kernels.gpu.rope import rope_and_write
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.rows import (
    LLAMA_8B,
    MODELS,
    QUANTIZED,
    TOKENS,
    Model,
    by_rows,
    codes_and_scales,
    normal,
    tolerance,
)

_BLOCK_SIZE = 16
_POSITIONS = 8192
_PREFILL = 1024  # with so many tokens, they are the first ones of a prompt; with fewer, of a sequence each


def cases() -> list[Case]:
    found = [_case(model, tokens, torch.bfloat16) for model in MODELS for tokens in TOKENS]
    found += [_case(LLAMA_8B, tokens, dtype) for dtype in QUANTIZED for tokens in (64, 4096)]
    for head_dim in (80, 96, 256):
        model = Model(f"head_dim {head_dim}", 4096, 32, 8, head_dim, 14336, 128256)
        found += [_case(model, 4096, dtype) for dtype in (torch.bfloat16, *QUANTIZED)]
    return found


def _case(model: Model, tokens: int, dtype: torch.dtype) -> Case:
    """`dtype` is that of the pools."""
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    quantized = dtype in QUANTIZED

    def prepare(device: torch.device, seed: int) -> Prepared:
        qkv = normal(device, seed, tokens, (heads + 2 * kv_heads) * head_dim)
        num_blocks = tokens if tokens < _PREFILL else tokens // _BLOCK_SIZE
        positions, slots = _places(device, seed, tokens, num_blocks)
        tables = reference.rope_tables(*reference.rope_frequencies(head_dim, 500000.0), _POSITIONS)
        cos, sin = (table.to(device) for table in tables)
        shape = (num_blocks, kv_heads, _BLOCK_SIZE, head_dim)
        k_pool, v_pool = (torch.zeros(shape, device=device).to(dtype) for _ in range(2))
        scales = [torch.zeros(shape[:3], device=device) for _ in range(2)] if quantized else [None, None]
        q_out = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device=device)

        def launch() -> object:
            rope_and_write(
                qkv,
                positions,
                slots,
                cos,
                sin,
                k_pool,
                v_pool,
                heads,
                k_scales=scales[0],
                v_scales=scales[1],
                q_out=q_out,
            )
            return (q_out, k_pool, v_pool, *scales) if quantized else (q_out, k_pool, v_pool)

        def expected_rows(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, k, v = torch.split(rows.view(len(rows), -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
            q, k = reference.apply_rope(q, cos, sin), reference.apply_rope(k, cos, sin)
            if not quantized:
                return q, k, v
            (k, k_scales), (v, v_scales) = codes_and_scales(k, dtype), codes_and_scales(v, dtype)
            return q, k, v, k_scales, v_scales

        def expected() -> object:
            q, *written = by_rows(expected_rows, qkv, cos[positions], sin[positions])
            pools = []
            for rows in written:
                pool = torch.zeros(num_blocks, _BLOCK_SIZE, *rows.shape[1:], device=device)
                pool.flatten(0, 1)[slots] = rows
                pools.append(pool.transpose(1, 2))
            return q, *pools

        return Prepared(launch, expected)

    moved = (heads + 2 * kv_heads) * head_dim * 2 + heads * head_dim * 2 + 2 * kv_heads * head_dim * dtype.itemsize
    moved += head_dim * 4 + 16  # cos and sin, position and slot
    moved += 2 * kv_heads * 4 if quantized else 0
    return Case(
        kernel="rope_and_write",
        name=f"{str(dtype)[6:]} KV, {model.name} {heads}/{kv_heads} x {head_dim}, {tokens} tokens",
        shape={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
        prepare=prepare,
        num_bytes=tokens * moved,
        tolerance=tolerance(dtype),
        candidates=tuple(
            {"HEADS": tile, "num_warps": warps} for tile, warps in product((2, 4, 8, 16, 32), (1, 2, 4, 8))
        ),
    )


def _places(device: torch.device, seed: int, tokens: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, slots), both [tokens] int64. Blocks are in no order."""
    if device.type == "meta":
        none = torch.empty(tokens, dtype=torch.int64, device=device)
        return none, none
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(num_blocks, generator=generator)
    if tokens < _PREFILL:
        positions = torch.randint(0, _POSITIONS, (tokens,), generator=generator)
        slots = blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE
    else:
        positions = torch.arange(tokens)
        slots = (blocks[:, None] * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE)).flatten()
    return positions.to(device), slots.to(device)
