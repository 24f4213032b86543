"""What the memory plan counts is what the GPU backend and its kernels take."""

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from config.gpu_memory import PREFILL_PARTIAL_BYTES, gpu_buffers, gpu_weight_bytes, sampling_bytes
from config.memory_plan import kv_bytes_per_token
from config.schema import ModelArch, ModelConfig, WeightFormats
from gpu_workers.backends.triton_kv import GpuKV
from kernels.gpu.pack import pack_integers
from kernels.gpu.prefill_attention import MOST_PARTIAL_BYTES

KV_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@st.composite
def archs(draw: Any) -> ModelArch:
    kv_heads = draw(st.sampled_from([1, 2, 3, 8]))
    return ModelArch(
        family="llama",
        hidden_size=32 * draw(st.integers(1, 20)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([32, 64, 80, 96, 128])),
        intermediate_size=32 * draw(st.integers(1, 20)),
        vocab_size=draw(st.integers(1, 99)),
        max_position=1 << 17,
        tie_embeddings=draw(st.booleans()),
    )


@given(archs(), st.integers(1, 4), st.integers(1, 40), st.sampled_from(list(KV_DTYPES)))
def test_the_kv_pool(arch: ModelArch, blocks: int, block_size: int, kv_dtype: str) -> None:
    sizes = (arch.num_layers, blocks, block_size, arch.num_kv_heads, arch.head_dim)
    kv = GpuKV.allocate(*sizes, kv_dtype, torch.device("meta"))
    taken = kv.pool.nbytes + (0 if kv.scales is None else kv.scales.nbytes)
    assert taken == blocks * block_size * kv_bytes_per_token(arch, kv_dtype)


def test_partial_results_of_prefill_attention() -> None:
    assert PREFILL_PARTIAL_BYTES == MOST_PARTIAL_BYTES


@given(archs(), st.integers(1, 300), st.integers(1, 1 << 17), st.sampled_from(list(KV_DTYPES)))
def test_partial_results_of_decode_attention(arch: ModelArch, seqs: int, length: int, kv_dtype: str) -> None:
    kernels = pytest.importorskip("kernels.gpu.decode_attention")
    needed = 4 * kernels.workspace_size(
        seqs,
        arch.num_heads,
        arch.head_dim,
        length,
        num_kv_heads=arch.num_kv_heads,
        kv_dtype=KV_DTYPES[kv_dtype],
    )
    planned = gpu_buffers(arch, "bfloat16", kv_dtype, 512, seqs, length, 16).attention
    assert planned == (max(needed, PREFILL_PARTIAL_BYTES) if needed else 0)


@pytest.mark.parametrize("vocab_size", [1, 128, 129, 49152, 128256])
def test_what_sampling_needs_beside_logits(vocab_size: int) -> None:
    kernels = pytest.importorskip("kernels.gpu.block_statistics")
    space = kernels.Workspace.allocate(1, vocab_size, torch.device("meta"))
    assert sampling_bytes(vocab_size) == sum(tensor.nbytes for tensor in space)


@given(
    archs(),
    st.sampled_from([(4, True), (4, False), (8, False)]),
    st.sampled_from([32, 64, 96, 128, 256, 1 << 30]),
)
def test_packed_weights(arch: ModelArch, kind: tuple[int, bool], group: int) -> None:
    bits, has_minimums = kind
    formats = WeightFormats(layers={f"int{bits}": 1}, group=group, has_minimums=has_minimums)  # type: ignore[dict-item]
    model = ModelConfig(model="m", dtype="bfloat16")
    floats = msgspec.structs.replace(arch, num_layers=0)
    planned, _ = gpu_weight_bytes(msgspec.structs.replace(arch, formats=formats), model)
    norms = 2 * 2 * arch.num_layers * arch.hidden_size
    planned -= gpu_weight_bytes(floats, model)[0] + norms
    queries = arch.num_heads * arch.head_dim
    assume(queries % 32 == 0)  # of a group at least
    matrices = (
        (queries + 2 * arch.num_kv_heads * arch.head_dim, arch.hidden_size),
        (arch.hidden_size, queries),
        (2 * arch.intermediate_size, arch.hidden_size),
        (arch.hidden_size, arch.intermediate_size),
    )
    taken = 0
    for n, k in matrices:
        found = next(size for size in (k, 128, 64, 32) if size <= k and (group >= k or group % size == 0))
        codes = torch.zeros(n, k, dtype=torch.uint8 if bits == 4 else torch.int8)
        scales = torch.ones(n, k // 32)
        minimums = (scales * -0.3 if has_minimums else scales * -8) if bits == 4 else None
        packed = pack_integers(codes, scales, minimums, found, torch.bfloat16, torch.device("cpu"))
        taken += arch.num_layers * packed.num_bytes
    assert planned == taken
