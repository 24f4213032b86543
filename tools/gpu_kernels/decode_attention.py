"""Cases of decode attention over a paged KV pool."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from kernels import reference
from kernels.gpu.decode_attention import decode_attention, settings_shape
from kernels.gpu.launch import cdiv
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.rows import LLAMA_8B, MODELS, Model, normal

_PAGE = 128  # positions of a block of flex attention's: its usual size, and the fastest
_QWEN, _SMOLLM = MODELS[1:]
_GEMMA = Model("Gemma-2-9B", 3584, 16, 8, 256, 14336, 256000)
_DTYPES = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class _Shape:
    model: Model
    batch: int
    context: int
    kv: str = "bfloat16"
    queries: int = 1
    window: int = 0
    soft_cap: float = 0.0
    bound: int = 0  # of contexts, as a CUDA graph is captured with; 0: `context`
    block_size: int = 16
    uneven: bool = False  # contexts from context / 8 up to `context`
    rival: bool = False

    @property
    def name(self) -> str:
        options = {
            f"{self.queries} queries": self.queries > 1,
            f"window {self.window}": self.window,
            f"soft cap {self.soft_cap:g}": self.soft_cap,
            f"bound {self.bound}": self.bound,
            f"blocks of {self.block_size}": self.block_size != 16,
            "uneven": self.uneven,
        }
        return f"{self.model.name} {self.batch}x{self.context} {self.kv}" + "".join(
            f", {text}" for text, on in options.items() if on
        )

    @property
    def contexts(self) -> list[int]:
        if not self.uneven:
            return [self.context] * self.batch
        return [self.context * (1 + index * 7 // max(self.batch - 1, 1)) // 8 for index in range(self.batch)]


_SHAPES = [
    *(_Shape(LLAMA_8B, 1, context) for context in (512, 2048, 8192, 32768)),
    _Shape(LLAMA_8B, 16, 4096),
    _Shape(LLAMA_8B, 64, 2048, rival=True),
    _Shape(LLAMA_8B, 64, 2048, bound=131072),
    _Shape(LLAMA_8B, 64, 2048, block_size=128),
    _Shape(LLAMA_8B, 64, 4096, uneven=True),
    _Shape(LLAMA_8B, 128, 2048, rival=True),
    _Shape(LLAMA_8B, 256, 1024),
    _Shape(LLAMA_8B, 32, 8192, rival=True),
    _Shape(LLAMA_8B, 32, 8192, window=1024),
    *(_Shape(LLAMA_8B, 1, 32768, kv) for kv in ("float8", "int8")),
    *(_Shape(LLAMA_8B, 64, 2048, kv) for kv in ("float8", "int8")),
    *(_Shape(LLAMA_8B, 32, 8192, kv) for kv in ("float8", "int8")),
    _Shape(LLAMA_8B, 256, 2048, "float8"),
    _Shape(LLAMA_8B, 1, 8192, queries=4),
    *(_Shape(LLAMA_8B, 64, 2048, kv, queries=4) for kv in ("bfloat16", "float8")),
    _Shape(LLAMA_8B, 16, 2048, queries=8),
    _Shape(_QWEN, 1, 32768),
    *(_Shape(_QWEN, 256, 2048, kv) for kv in ("bfloat16", "float8")),
    *(_Shape(_GEMMA, 16, 8192, kv, window=4096, soft_cap=50.0) for kv in ("bfloat16", "float8")),
    _Shape(_SMOLLM, 1, 2048),
    _Shape(_SMOLLM, 64, 2048, rival=True),
    *(_Shape(_SMOLLM, 256, 2048, kv) for kv in ("bfloat16", "float8", "int8")),
]


def cases() -> list[Case]:
    return [_case(shape) for shape in _SHAPES]


def _case(shape: _Shape) -> Case:
    model, kv_dtype = shape.model, _DTYPES[shape.kv]
    scaled = kv_dtype.itemsize == 1
    rows = shape.batch * shape.queries
    read = [min(context, shape.window + shape.queries - 1 if shape.window else context) for context in shape.contexts]
    seen = [min(context, shape.window or context) for context in shape.contexts]
    return Case(
        "decode_attention",
        shape.name,
        settings_shape(shape.queries, model.heads // model.kv_heads, model.head_dim, kv_dtype),
        partial(_prepare, shape),
        num_bytes=2 * sum(read) * model.kv_heads * (model.head_dim * kv_dtype.itemsize + 4 * scaled)
        + 4 * rows * model.heads * model.head_dim,
        operations=4 * shape.queries * sum(seen) * model.heads * model.head_dim,
        rival="flex attention, paged" if shape.rival else "",
        candidates=_candidates(scaled, model.head_dim),
    )


def _candidates(scaled: bool, head_dim: int) -> tuple[Mapping[str, Any], ...]:
    tiles = [tile * 128 // head_dim for tile in (32, 64, 128)]
    return tuple(
        {"TILE": tile, "RESIDENT": resident, "MERGED": 16, "num_warps": warps, "num_stages": stages}
        for tile, warps, stages, resident in product(tiles, (2, 4, 8), (2, 3, 4), (1, 2, 3, 4))
        # What may be in flight on a multiprocessor: enough, and no more than fits beside what is computed with.
        if 64 << 10 <= tile * head_dim * (2 if scaled else 4) * stages * resident <= 208 << 10
        and 64 <= tile * head_dim // (warps * 32) <= 128
    )


def _prepare(shape: _Shape, device: torch.device, seed: int) -> Prepared:
    model, contexts = shape.model, shape.contexts
    blocks_each = cdiv(shape.context, shape.block_size)
    num_blocks = shape.batch * blocks_each
    size = (num_blocks, model.kv_heads, shape.block_size, model.head_dim)
    q = normal(device, seed, shape.batch * shape.queries, model.heads, model.head_dim)
    k_pool, v_pool = (_pool(device, seed + i, size, _DTYPES[shape.kv]) for i in (1, 2))
    k_scales = v_scales = None
    if k_pool.dtype.itemsize == 1:
        k_scales, v_scales = (_scales(device, seed + i, size[:3], k_pool.dtype) for i in (3, 4))
    if device.type == "meta":
        tables = torch.empty(shape.batch, blocks_each, dtype=torch.int32, device=device)
        context_lens = torch.empty(shape.batch, dtype=torch.int32, device=device)
    else:
        random = torch.Generator().manual_seed(seed)
        tables = torch.randperm(num_blocks, generator=random).view(shape.batch, -1).int().to(device)
        context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    scale = model.head_dim**-0.5

    def launch() -> torch.Tensor:
        return decode_attention(
            q,
            k_pool,
            v_pool,
            tables,
            context_lens,
            max_context=shape.bound or shape.context,
            scale=scale,
            window=shape.window,
            soft_cap=shape.soft_cap,
            k_scales=k_scales,
            v_scales=v_scales,
            queries=shape.queries,
        )

    def expected() -> torch.Tensor:
        outputs = []
        for index, context in enumerate(contexts):
            blocks = tables[index, : cdiv(context, shape.block_size)].long()
            k, v = (_values(pool, scales, blocks) for pool, scales in ((k_pool, k_scales), (v_pool, v_scales)))
            rows = q[index * shape.queries : (index + 1) * shape.queries].double()
            with device:  # where the oracle makes its indices
                outputs.append(
                    reference.paged_attention(
                        rows,
                        k,
                        v,
                        torch.arange(len(blocks))[None],
                        shape.block_size,
                        [0, shape.queries],
                        [context],
                        shape.window,
                        soft_cap=shape.soft_cap,
                    )
                )
        return torch.cat(outputs)

    rival = _flex_attention(q, k_pool, v_pool, tables, context_lens, scale) if shape.rival else None
    return Prepared(launch, expected, rival if device.type == "cuda" else None)


def _pool(device: torch.device, seed: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values, or codes, that are normally distributed."""
    if dtype.itemsize > 1 or device.type == "meta":
        return normal(device, seed, *size, dtype=dtype)
    pool = torch.empty(size, dtype=dtype, device=device)
    largest = 127 if dtype == torch.int8 else 448
    for index, part in enumerate(torch.split(pool, cdiv(size[0], 64))):
        values = normal(device, seed + 100 * index, *part.shape, dtype=torch.float32)
        part.copy_((values * (largest / 4)).clamp(-largest, largest))
    return pool


def _scales(device: torch.device, seed: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Such that values are about as large as with `normal`."""
    spread = normal(device, seed, *size, dtype=torch.float32)
    return spread.mul_(0.25).exp_().mul_(4 / (127 if dtype == torch.int8 else 448))


def _values(pool: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
    """Of K or V in `blocks`, in their order, in float64: [slots, G, D]."""
    values = pool[blocks].double()
    if scales is not None:
        values *= scales[blocks].double()[..., None]
    return values.transpose(1, 2).flatten(0, 1)


def _flex_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> Callable[[], torch.Tensor]:
    """torch's flex attention over the same keys in pages of its own, with a mask that finds those of a sequence.

    Made and compiled by the first call: of contexts of whole pages, and of one query a sequence.
    """
    run: Callable[[], torch.Tensor] | None = None

    def build() -> Callable[[], torch.Tensor]:
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        batch, blocks_each = tables.shape
        pages_each = blocks_each * k_pool.shape[2] // _PAGE
        num_pages = batch * pages_each
        pages = torch.randperm(num_pages, device=q.device).view(batch, pages_each)  # of each sequence
        logical = torch.full((batch, num_pages), -1, device=q.device)  # which page of a sequence a page is
        logical.scatter_(1, pages, torch.arange(pages_each, device=q.device).expand(batch, -1))

        def paged(pool: torch.Tensor) -> torch.Tensor:
            groups, head_dim = pool.shape[1], pool.shape[3]
            keys = torch.empty(groups, num_pages, _PAGE, head_dim, dtype=pool.dtype, device=pool.device)
            for index in range(batch):
                values = pool[tables[index].long()].transpose(0, 1).reshape(groups, pages_each, _PAGE, head_dim)
                keys[:, pages[index]] = values
            return keys.view(1, groups, num_pages * _PAGE, head_dim)

        def seen(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            page = logical[b, slot // _PAGE]
            return (page >= 0) & (page * _PAGE + slot % _PAGE < context_lens[b])

        def listed(some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            counts = torch.full((batch, 1, 1), some.shape[1], dtype=torch.int32, device=q.device)
            return counts, torch.nn.functional.pad(some, (0, num_pages - some.shape[1])).int()[:, None, None]

        # The last page of a sequence is masked; the others need not be.
        mask = BlockMask.from_kv_blocks(
            *listed(pages[:, -1:]),
            *listed(pages[:, :-1]),
            BLOCK_SIZE=(_PAGE, _PAGE),
            mask_mod=seen,
            seq_lengths=(1, num_pages * _PAGE),
            compute_q_blocks=False,
        )
        keys, values = paged(k_pool), paged(v_pool)
        compiled = torch.compile(flex_attention)
        rows = q[:, :, None]
        return lambda: compiled(rows, keys, values, block_mask=mask, scale=scale, enable_gqa=True)

    def launch() -> torch.Tensor:
        nonlocal run
        if run is None:
            run = build()
        return run()

    return launch
