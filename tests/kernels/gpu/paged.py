"""Random batches over a paged KV pool, with what attention over them must give.

Whatever no query may see is poison: NaN in the pools and in the scales, and in the block tables the id of a block that
has nothing else.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from kernels import reference
from tests.kernels.gpu.device import DEVICE

# The largest relative error of one rounding.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(slots=True, frozen=True)
class Batch:
    """Arguments of the attention kernels, on DEVICE, and the oracle's results in float64, on the CPU."""

    q: torch.Tensor  # [T, H, D]
    k_pool: torch.Tensor  # [blocks, G, block size, D]
    v_pool: torch.Tensor
    k_scales: torch.Tensor | None  # [blocks, G, block size]
    v_scales: torch.Tensor | None
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    scale: float
    window: int
    soft_cap: float
    expected: torch.Tensor  # [T, H, D]
    magnitude: torch.Tensor  # the same with |v|: what rounding errors of the weights are relative to

    @property
    def max_query_len(self) -> int:
        return int(self.query_starts.diff().max())

    @property
    def max_context(self) -> int:
        return int(self.context_lens.max())

    def worst_error(self, actual: torch.Tensor) -> float:
        """The largest error as a part of what is allowed; infinite with a NaN.

        Allowed are one rounding of each weight, to the dtype of the product with V, one of the result, which may be
        subnormal, and float32's errors in scores and sums, which lengths and dimensions of tests keep below 2^-14.
        """
        weights = torch.bfloat16 if self.q.dtype == torch.float16 and self.k_scales is not None else self.q.dtype
        allowed = (ROUNDING[weights] + ROUNDING[self.q.dtype] + 2.0**-14) * self.magnitude
        allowed += torch.finfo(self.q.dtype).smallest_normal * ROUNDING[self.q.dtype]
        error = (actual.double().cpu() - self.expected).abs() / allowed
        return float(error.max()) if not error.isnan().any() else math.inf


def make_batch(
    seed: int,
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    scaled: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Batch:
    """`kv_dtype` None: `dtype`. Scales of int8 and float8_e4m3fn, if `scaled`, spread over a factor of 1000."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=random)
    poison, order = int(order[0]), order[1:]
    tables = torch.full((len(counts), max(counts) + 1), poison)
    seen = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    seen_tables = tables.clone()
    for row, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        tables[row, :count] = order[end - count : end]
        context, queries = context_lens[row], query_lens[row]
        first = max(0, context - queries - window + 1) if window else 0
        positions = torch.arange(first, context) if queries else torch.arange(0)
        seen[tables[row, positions // block_size], positions % block_size] = True
        first_block = first // block_size if queries else count
        seen_tables[row, first_block:count] = tables[row, first_block:count]
    starts = [0, *accumulate(query_lens)]
    q = torch.randn(starts[-1], num_heads, head_dim, generator=random).to(dtype)
    shape = (num_blocks, num_groups, block_size, head_dim)
    pools, scales, exact = [], [], []
    for _ in range(2):
        pool, pool_scales, values = _pool(shape, kv_dtype or dtype, scaled, random)
        hidden = ~seen[:, None, :, None].expand(shape)
        if pool_scales is not None:
            pool_scales = pool_scales.masked_fill(hidden[..., 0], torch.nan).to(DEVICE)
        if pool.dtype.itemsize > 1:
            pool = pool.masked_fill(hidden, torch.nan)
        elif pool.dtype == torch.float8_e4m3fn:
            pool = pool.view(torch.uint8).masked_fill(hidden, 0x7F).view(pool.dtype)
        pools.append(pool.to(DEVICE))
        scales.append(pool_scales)
        exact.append(values.transpose(1, 2).flatten(0, 1))
    scale = head_dim**-0.5
    k, v = exact
    arguments = (tables, block_size, starts, context_lens, window, scale, soft_cap)
    numbers = (seen_tables, torch.tensor(starts), torch.tensor(context_lens))
    return Batch(
        q.to(DEVICE),
        *pools,
        *scales,
        *(number.int().to(DEVICE) for number in numbers),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        expected=reference.paged_attention(q.double(), k, v, *arguments),
        magnitude=reference.paged_attention(q.double(), k, v.abs(), *arguments),
    )


def _pool(
    shape: tuple[int, ...], dtype: torch.dtype, scaled: bool, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(pool, scales or None, values in float64)."""
    values = torch.randn(shape, generator=random)
    if dtype.itemsize > 1:
        pool = values.to(dtype)
        return pool, None, pool.double()
    if not scaled:
        pool = values.round().to(dtype)
        return pool, None, pool.double()
    scales = 10.0 ** -(3 * torch.rand(shape[:-1], generator=random)) / 8
    largest = 127 if dtype == torch.int8 else 448
    pool = (values / 3 * largest).clamp(-largest, largest).round().to(dtype)
    return pool, scales, pool.double() * scales.double()[..., None]
