"""What a GPU's memory holds, by hand for published models, and what must be so for any."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.gpu_memory import GpuBuffers, gpu_buffers, gpu_weight_bytes, graph_bytes, token_width
from config.graphs import graph_buckets, graph_contexts
from config.memory_plan import kv_bytes_per_token, parameter_count
from config.schema import ModelArch, ModelConfig, WeightFormat, WeightFormats
from tools.model_shapes import LLAMA_3_1_8B, MISTRAL_7B_V03, QWEN_2_5_1_5B, SMOLLM2_135M

ARCHS = [LLAMA_3_1_8B, MISTRAL_7B_V03, QWEN_2_5_1_5B, SMOLLM2_135M]


def weights(arch: ModelArch, dtype: str = "bfloat16", quantization: str = "auto", tp: int = 1) -> tuple[int, str]:
    return gpu_weight_bytes(arch, ModelConfig(model="m", dtype=dtype, quantization=quantization), tp)  # type: ignore[arg-type]


def formatted(arch: ModelArch, layers: WeightFormat, **others: object) -> ModelArch:
    return msgspec.structs.replace(arch, formats=WeightFormats(layers={layers: 1}, **others))  # type: ignore[arg-type]


@given(st.integers(0, 5000))
def test_every_decode_batch_has_a_bucket_that_is_not_much_larger(largest: int) -> None:
    buckets = graph_buckets(largest)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1:] == ((largest,) if largest else ())
    for smaller, larger in zip((0, *buckets), buckets, strict=False):
        assert larger - smaller <= max(1, 2 if smaller < 4 else 4 if smaller < 8 else 8 if smaller < 64 else 16)


def test_buckets_of_the_usual_sizes() -> None:
    assert graph_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert graph_buckets(100) == (*graph_buckets(64), 80, 96, 100)
    assert (graph_buckets(0), graph_buckets(1), graph_buckets(3)) == ((), (1,), (1, 2, 3))


@given(st.integers(1, 1 << 20))
def test_every_context_has_a_graph(longest: int) -> None:
    contexts = graph_contexts(longest)
    assert contexts[-1] == longest
    assert all(small < large <= 4 * small for small, large in itertools.pairwise(contexts))


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: f"{arch.num_layers}x{arch.hidden_size}")
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_floats_take_what_their_parameters_take(arch: ModelArch, dtype: str, size: int) -> None:
    """Also a tied head: it is the embedding."""
    assert weights(arch, dtype) == (size * parameter_count(arch), f"matrices are held as {dtype}")


def test_integers_are_filled_up_to_whole_blocks() -> None:
    # SmolLM2: 30 layers of qkv 960 x 576, o 576 x 576, gate and up 3072 x 576, down 576 x 1536; 576 inputs are filled
    # up to 640 of 4 bits, and are whole blocks of 64 of 8 bits.
    floats = 2 * (49_152 * 576 + 61 * 576)
    rows_of_576, rows_of_1536 = 960 + 576 + 3072, 576
    int4 = formatted(SMOLLM2_135M, "int4")
    of_4_bits = rows_of_576 * (640 // 2 + 2 * 2 * 640 // 32) + rows_of_1536 * (1536 // 2 + 2 * 2 * 1536 // 32)
    assert weights(int4) == (floats + 30 * of_4_bits, "matrices are held as bfloat16, int4")
    # Without minimums; in groups of 128 and more, whose scales have a minimum's room; in one group.
    of_32 = rows_of_576 * (320 + 2 * 20) + rows_of_1536 * (768 + 2 * 48)
    assert weights(formatted(SMOLLM2_135M, "int4", has_minimums=False))[0] == floats + 30 * of_32
    of_128 = rows_of_576 * (320 + 4 * 5) + rows_of_1536 * (768 + 4 * 12)
    assert weights(formatted(SMOLLM2_135M, "int4", group=128, has_minimums=False))[0] == floats + 30 * of_128
    assert weights(formatted(SMOLLM2_135M, "int4", group=256))[0] == floats + 30 * of_128
    of_all = rows_of_576 * (320 + 4) + rows_of_1536 * (768 + 4)
    assert weights(formatted(SMOLLM2_135M, "int4", group=1 << 30, has_minimums=False))[0] == floats + 30 * of_all
    of_8_bits = rows_of_576 * (576 + 2 * 576 // 32) + rows_of_1536 * (1536 + 2 * 1536 // 32)
    assert weights(formatted(SMOLLM2_135M, "int8"))[0] == floats + 30 * of_8_bits


def test_integers_can_be_left_out_and_an_untied_head_has_its_own_format() -> None:
    int4 = formatted(LLAMA_3_1_8B, "int4", head="int8")
    assert weights(int4, quantization="none") == (2 * 8_030_261_248, "matrices are held as bfloat16")
    size, held = weights(int4)
    head = 128_256 * 4096
    layers = 32 * (6144 * 4096 + 4096 * 4096 + 28_672 * 4096 + 4096 * 14_336)
    assert size == 2 * (head + 65 * 4096) + layers * 20 // 32 + head * 34 // 32
    assert held == "matrices are held as bfloat16, int4, int8"


def test_ranks_share_what_is_split() -> None:
    norms = 2 * 65 * 4096
    assert 4 * (weights(LLAMA_3_1_8B, tp=4)[0] - norms) == weights(LLAMA_3_1_8B)[0] - norms


def test_eight_bit_keys_have_a_scale_each() -> None:
    for arch in ARCHS:
        for dtype in ("int8", "fp8"):
            assert kv_bytes_per_token(arch, dtype) == 2 * arch.num_layers * arch.num_kv_heads * (arch.head_dim + 4)


def test_buffers_of_an_8b_model_by_hand() -> None:
    # 3 x 4096 for the residual, the normed input and a result; 6144 for qkv and 4096 for attention; 3 x 14336.
    assert token_width(LLAMA_3_1_8B) == 3 * 4096 + 6144 + 4096 + 3 * 14_336
    assert gpu_buffers(LLAMA_3_1_8B, "bfloat16", "bfloat16", 8192, 256, 131_072, 16) == GpuBuffers(
        tokens=8192 * 65_536 * 2,
        logits=256 * (2 * 128_256 * 4 + 2 * 4 * 4096 + 8 + 1002 * 16),  # 4096 candidates, 1002 blocks
        attention=256 * 32 * 64 * 130 * 4,  # 64 splits
        tables=131_072 * 128 * 4 + 2 * 256 * 8192 * 4 + 8192 * 64,
    )


def test_short_contexts_are_not_split() -> None:
    assert gpu_buffers(LLAMA_3_1_8B, "bfloat16", "bfloat16", 512, 64, 256, 16).attention == 0
    assert gpu_buffers(LLAMA_3_1_8B, "bfloat16", "bfloat16", 512, 64, 257, 16).attention == 64 << 20  # of a prefill
    assert gpu_buffers(LLAMA_3_1_8B, "bfloat16", "fp8", 512, 64, 512, 16).attention == 0  # half the bytes


def test_without_graphs_they_take_nothing_and_each_one_counts() -> None:
    def graphs(seqs: int, length: int) -> int:
        return graph_bytes(SMOLLM2_135M, "bfloat16", "bfloat16", seqs, length, 16)

    assert graphs(0, 8192) == 0
    assert graphs(1, 2048) < graphs(2, 2048) < graphs(2, 8192)


@given(
    arch=st.sampled_from(ARCHS),
    step=st.integers(64, 8192),
    seqs=st.integers(1, 64),
    length=st.integers(16, 1 << 17),
    block_size=st.integers(1, 256),
)
def test_a_smaller_setting_never_takes_more(
    arch: ModelArch, step: int, seqs: int, length: int, block_size: int
) -> None:
    """What the advice on plans that don't fit searches by."""
    whole = gpu_buffers(arch, "bfloat16", "fp8", step, seqs, length, block_size).total
    assert gpu_buffers(arch, "bfloat16", "fp8", step - 1, seqs, length, block_size).total <= whole
    assert gpu_buffers(arch, "bfloat16", "fp8", step, max(1, seqs - 1), length, block_size).total <= whole
    assert gpu_buffers(arch, "bfloat16", "fp8", step, seqs, length - 1, block_size).total <= whole
    graphs = graph_bytes(arch, "bfloat16", "fp8", seqs, length, block_size)
    assert graph_bytes(arch, "bfloat16", "fp8", seqs - 1, length, block_size) <= graphs
    assert graph_bytes(arch, "bfloat16", "fp8", seqs, length - 1, block_size) <= graphs
