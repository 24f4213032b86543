"""Paged KV pools for the cases of attention kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import reference
from kernels.gpu.launch import cdiv
from tools.gpu_kernels.rows import Model, normal

BLOCK_SIZE = 16
_PIECE = 512  # queries that the oracle computes together


@dataclass(frozen=True, slots=True)
class Paged:
    """The pools of one layer, in which sequences lie in blocks in random order."""

    k_pool: torch.Tensor  # [blocks, G, block size, D]
    v_pool: torch.Tensor
    k_scales: torch.Tensor | None  # [blocks, G, block size], of codes
    v_scales: torch.Tensor | None
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    contexts: Sequence[int]

    def expected(
        self, q: torch.Tensor, query_lens: Sequence[int], window: int = 0, soft_cap: float = 0.0
    ) -> torch.Tensor:
        """Attention of the last queries of each sequence, all in q [T, H, D], computed in float64."""
        repeats = q.shape[1] // self.k_pool.shape[1]
        result, start = torch.empty(q.shape, dtype=torch.float32, device=q.device), 0
        for index, (count, context) in enumerate(zip(query_lens, self.contexts, strict=True)):
            keys, values = (
                self._values(pool, scales, index)
                for pool, scales in ((self.k_pool, self.k_scales), (self.v_pool, self.v_scales))
            )
            blocks = torch.arange(cdiv(context, BLOCK_SIZE), device=q.device)[None]
            for first in range(0, count, _PIECE):
                piece = slice(start + first, start + min(first + _PIECE, count))
                end = context - count + min(first + _PIECE, count)
                for group in range(keys.shape[1]):
                    heads = slice(group * repeats, (group + 1) * repeats)
                    with q.device:  # where the oracle makes its indices
                        result[piece, heads] = reference.paged_attention(
                            q[piece, heads].double(),
                            keys[:, group : group + 1],
                            values[:, group : group + 1],
                            blocks,
                            BLOCK_SIZE,
                            [0, piece.stop - piece.start],
                            [end],
                            window,
                            soft_cap=soft_cap,
                        ).float()
            start += count
        return result

    def contiguous(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [context, G, D] of a sequence, as the pools hold them."""
        blocks = self.block_tables[index, : cdiv(self.contexts[index], BLOCK_SIZE)].long()
        k, v = (pool[blocks].transpose(1, 2).flatten(0, 1) for pool in (self.k_pool, self.v_pool))
        return k[: self.contexts[index]], v[: self.contexts[index]]

    def _values(self, pool: torch.Tensor, scales: torch.Tensor | None, index: int) -> torch.Tensor:
        """Of K or V of a sequence in float64: [slots, G, D]."""
        blocks = self.block_tables[index, : cdiv(self.contexts[index], BLOCK_SIZE)].long()
        values = pool[blocks].double()
        if scales is not None:
            values *= scales[blocks].double()[..., None]
        return values.transpose(1, 2).flatten(0, 1)


def make_paged(
    device: torch.device, seed: int, model: Model, contexts: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> Paged:
    """Random pools; of an 8-bit `dtype` with scales, such that values are about as large as others'."""
    blocks_each = cdiv(max(contexts), BLOCK_SIZE)
    num_blocks = len(contexts) * blocks_each
    size = (num_blocks, model.kv_heads, BLOCK_SIZE, model.head_dim)
    k_pool, v_pool = (_pool(device, seed + index, size, dtype) for index in (1, 2))
    k_scales = v_scales = None
    if dtype.itemsize == 1:
        k_scales, v_scales = (_scales(device, seed + index, size[:3], dtype) for index in (3, 4))
    if device.type == "meta":
        tables = torch.empty(len(contexts), blocks_each, dtype=torch.int32, device=device)
        context_lens = torch.empty(len(contexts), dtype=torch.int32, device=device)
    else:
        random = torch.Generator().manual_seed(seed)
        tables = torch.randperm(num_blocks, generator=random).view(len(contexts), -1).int().to(device)
        context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    return Paged(k_pool, v_pool, k_scales, v_scales, tables, context_lens, contexts)


def kv_bytes(model: Model, keys: int, dtype: torch.dtype) -> int:
    """Of K and V of so many positions, with their scales."""
    return 2 * keys * model.kv_heads * (model.head_dim * dtype.itemsize + (4 if dtype.itemsize == 1 else 0))


def _pool(device: torch.device, seed: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize > 1 or device.type == "meta":
        return normal(device, seed, *size, dtype=dtype)
    pool = torch.empty(size, dtype=dtype, device=device)
    largest = _largest(dtype)
    piece = cdiv(size[0], 64)
    for first in range(0, size[0], piece):
        part = pool[first : first + piece]
        values = normal(device, seed + 100 * first, *part.shape, dtype=torch.float32)
        part.copy_((values * (largest / 4)).clamp(-largest, largest))
    return pool


def _scales(device: torch.device, seed: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    spread = normal(device, seed, *size, dtype=torch.float32)
    return spread.mul_(0.25).exp_().mul_(4 / _largest(dtype))


def _largest(dtype: torch.dtype) -> float:
    return 127 if dtype == torch.int8 else 448
