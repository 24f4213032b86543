"""Cases of prefill attention over a paged KV pool."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
import torch.nn.functional as F

from kernels.gpu.prefill_attention import choice, prefill_attention
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.paged import Paged, kv_bytes, make_paged
from tools.gpu_kernels.rows import LLAMA_8B, MODELS, Model, normal

_QWEN, _SMOLLM = MODELS[1:]
_LLAMA_1B = Model("Llama-3.2-1B", 2048, 32, 8, 64, 8192, 128256)
_PHI_2 = Model("Phi-2", 2560, 32, 32, 80, 10240, 51200)
_PHI_3 = Model("Phi-3-mini", 3072, 32, 32, 96, 8192, 32064)
_GEMMA_2 = Model("Gemma-2-9B", 3584, 16, 8, 256, 14336, 256000)
_GEMMA_7B = Model("Gemma-7B", 3072, 16, 16, 256, 24576, 256000)
_DTYPES = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn, "int8": torch.int8, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class _Shape:
    model: Model
    chunks: Sequence[tuple[int, int]]  # (new tokens, those before them) of each sequence
    text: str
    kv: str = "bfloat16"
    window: int = 0
    soft_cap: float = 0.0
    deterministic: bool = False
    rival: bool = False  # of whole prompts of one length

    @property
    def query_lens(self) -> list[int]:
        return [new for new, _ in self.chunks]

    @property
    def contexts(self) -> list[int]:
        return [new + before for new, before in self.chunks]

    @property
    def num_seen(self) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(
            min(before + index + 1, self.window or before + index + 1)
            for new, before in self.chunks
            for index in range(new)
        )


def _prompt(model: Model, tokens: int, batch: int = 1, **options: Any) -> _Shape:
    text = f"{model.name} {batch}x{tokens}" if batch > 1 else f"{model.name} {tokens}"
    return _Shape(model, [(tokens, 0)] * batch, text, **options)


def _chunk(model: Model, tokens: int, before: int, **options: Any) -> _Shape:
    return _Shape(model, [(tokens, before)], f"{model.name} {tokens} after {before}", **options)


_MIXED = _Shape(LLAMA_8B, [(1, 4095)] * 64 + [(2048, 2048)], f"{LLAMA_8B.name} 2048 after 2048, 64 decodes at 4096")
_DECODES = _Shape(LLAMA_8B, [(1, 8191)] * 32, f"{LLAMA_8B.name} 32 decodes at 8192", deterministic=True)
_UNEVEN = _Shape(LLAMA_8B, [(256 * size, 0) for size in (1, 8, 2, 6, 3, 5, 4, 3)], f"{LLAMA_8B.name} 8 of 256 to 2048")
_VERIFIED = [
    _Shape(model, [(4, 2044)] * 64, f"{model.name} 64x4 after 2044", kv=kv)
    for model in (LLAMA_8B, _LLAMA_1B)
    for kv in ("bfloat16", "float8")
]

_SHAPES = [
    *(_prompt(LLAMA_8B, tokens, rival=True) for tokens in (1024, 2048, 4096, 8192, 16384)),
    *(_prompt(_LLAMA_1B, tokens, rival=True) for tokens in (1024, 2048, 4096, 8192, 16384)),
    _prompt(LLAMA_8B, 1024, batch=8, rival=True),
    _prompt(_QWEN, 8192, rival=True),
    _prompt(_SMOLLM, 8192, rival=True),
    _prompt(_PHI_2, 2048, batch=4, rival=True),
    _prompt(_PHI_3, 4096, batch=2, rival=True),
    _prompt(_GEMMA_7B, 8192, rival=True),
    _prompt(_GEMMA_2, 8192, window=4096, soft_cap=50.0),
    _prompt(LLAMA_8B, 16384, window=4096),
    _UNEVEN,
    _chunk(LLAMA_8B, 512, 32256),
    _chunk(LLAMA_8B, 2048, 30720),
    _chunk(_QWEN, 2048, 30720),
    _MIXED,
    *_VERIFIED,
    _Shape(_GEMMA_2, [(4, 2044)] * 64, f"{_GEMMA_2.name} 64x4 after 2044", soft_cap=50.0),
    _Shape(_GEMMA_2, [(4, 2044)] * 64, f"{_GEMMA_2.name} 64x4 after 2044", kv="float8", soft_cap=50.0),
    *(_prompt(model, 8192, kv=kv) for model in (LLAMA_8B, _LLAMA_1B) for kv in ("float8", "int8")),
    _prompt(_GEMMA_2, 8192, kv="float8", window=4096, soft_cap=50.0),
    _chunk(LLAMA_8B, 2048, 30720, kv="float8"),
    *(_prompt(model, 8192, deterministic=True) for model in (LLAMA_8B, _LLAMA_1B)),
    _prompt(_GEMMA_2, 8192, window=4096, soft_cap=50.0, deterministic=True),
    *(
        _prompt(model, 8192, kv=kv, deterministic=True)
        for model in (LLAMA_8B, _LLAMA_1B, _GEMMA_2)
        for kv in ("float8", "int8")
    ),
    _DECODES,
    *(_prompt(_GEMMA_2, 512, kv="float32", deterministic=deterministic) for deterministic in (False, True)),
]


def cases() -> list[Case]:
    return [_case(shape) for shape in _SHAPES]


def _case(shape: _Shape) -> Case:
    model, kv_dtype = shape.model, _DTYPES[shape.kv]
    repeats = model.heads // model.kv_heads
    kernel, chosen_by = choice(
        model.head_dim, kv_dtype, max(shape.query_lens) * repeats, deterministic=shape.deterministic
    )
    keys = sum(min(new + before, (shape.window or before + 1) + new - 1) for new, before in shape.chunks)
    options = f", window {shape.window}" * bool(shape.window) + f", soft cap {shape.soft_cap:g}" * bool(shape.soft_cap)
    return Case(
        kernel,
        f"{shape.text}, {shape.kv}{options}",
        chosen_by,
        partial(_prepare, shape),
        num_bytes=kv_bytes(model, keys, kv_dtype)
        + 2 * _query_dtype(shape).itemsize * sum(shape.query_lens) * model.heads * model.head_dim,
        operations=4 * shape.num_seen * model.heads * model.head_dim,
        rival="cuDNN SDPA" if shape.rival else "",
        hot=kv_dtype != torch.float32,  # without tensor cores: for comparisons
        candidates=_candidates(model.head_dim, kv_dtype, max(shape.query_lens) * repeats, shape.deterministic),
    )


def _candidates(head_dim: int, kv_dtype: torch.dtype, rows: int, deterministic: bool) -> tuple[Mapping[str, Any], ...]:
    """What may fit the registers and the shared memory of some architecture; compiling says which of them does."""
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    if kv_dtype == torch.float32:
        return ()
    blocks = (16, 64) if rows <= 64 and not deterministic else (64, 128)
    return tuple(
        {"BLOCK_M": block_m, "TILE": tile, "SEGMENT": 1024, "num_warps": warps, "num_stages": stages}
        for block_m, tile, warps, stages in product(blocks, (32, 64, 128), (4, 8), (2, 3))
        # Values and scores of a thread in float32, and what is on its way at a time.
        if 24 <= max(block_m, 32) * (width * (1 + deterministic) + tile) // (warps * 32) <= 192
        and 2 * block_m * width + 2 * tile * width * kv_dtype.itemsize * stages <= 227 << 10
    )


def _query_dtype(shape: _Shape) -> torch.dtype:
    return torch.float32 if shape.kv == "float32" else torch.bfloat16


def _prepare(shape: _Shape, device: torch.device, seed: int) -> Prepared:
    model = shape.model
    q = normal(device, seed, sum(shape.query_lens), model.heads, model.head_dim, dtype=_query_dtype(shape))
    paged = make_paged(device, seed, model, shape.contexts, _DTYPES[shape.kv])
    starts = torch.tensor([0, *accumulate(shape.query_lens)], dtype=torch.int32).to(device)

    def launch() -> torch.Tensor:
        return prefill_attention(
            q,
            paged.k_pool,
            paged.v_pool,
            paged.block_tables,
            starts,
            paged.context_lens,
            max_query_len=max(shape.query_lens),
            scale=model.head_dim**-0.5,
            window=shape.window,
            soft_cap=shape.soft_cap,
            k_scales=paged.k_scales,
            v_scales=paged.v_scales,
            deterministic=shape.deterministic,
            max_context=max(shape.contexts),
        )

    def expected() -> torch.Tensor:
        return paged.expected(q, shape.query_lens, shape.window, shape.soft_cap)

    rival = _cudnn(q, paged) if shape.rival and device.type == "cuda" else None
    return Prepared(launch, expected, rival)


def _cudnn(q: torch.Tensor, paged: Paged) -> Callable[[], torch.Tensor]:
    """torch's attention by cuDNN over whole prompts in tensors of their own, made by the first call."""
    tensors: list[torch.Tensor] = []

    def launch() -> torch.Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if not tensors:
            batch, heads = len(paged.contexts), q.shape[1]
            pairs = [paged.contiguous(index) for index in range(batch)]
            keys, values = (torch.stack(parts) for parts in zip(*pairs, strict=True))
            repeats = heads // keys.shape[2]
            tensors.append(q.view(batch, -1, heads, q.shape[2]).transpose(1, 2).contiguous())
            tensors.extend(part.repeat_interleave(repeats, 2).transpose(1, 2).contiguous() for part in (keys, values))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(tensors[0], tensors[1], tensors[2], is_causal=True)

    return launch
