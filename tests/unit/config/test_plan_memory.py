"""Arithmetic of the memory plan, against the sizes that the model authors publish."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.arch import read_arch
from config.machine import Machine
from config.memory_plan import (
    activation_bytes,
    kv_bytes_per_token,
    parameter_count,
    smallest_tp,
    weight_bytes,
)
from config.plan_advice import shortage
from config.plan_report import full_report, short_report
from config.resolve import Resolved, resolve
from config.schema import Config, ModelArch, ModelConfig, WeightFormat, WeightFormats
from config.sources import read_settings
from kernels.cpu.build import BuildError
from kernels.cpu.library import AttentionSizes, KvType, kv_block_bytes, load
from tools.model_shapes import LLAMA_3_1_8B, LLAMA_3_2_1B, MISTRAL_7B_V03, QWEN_2_5_1_5B, SMOLLM2_135M

GIB = 1 << 30


@pytest.mark.parametrize(
    ("arch", "parameters", "kv_bytes"),
    [
        # Parameters as the hub counts them in the checkpoints; KV from 2 x layers x KV heads x head dim x 2 bytes.
        (LLAMA_3_1_8B, 8_030_261_248, 131_072),
        (LLAMA_3_2_1B, 1_235_814_400, 32_768),
        (QWEN_2_5_1_5B, 1_543_714_304, 28_672),
        (SMOLLM2_135M, 134_515_008, 23_040),
        (MISTRAL_7B_V03, 7_248_023_552, 131_072),
    ],
    ids=["llama-3.1-8b", "llama-3.2-1b", "qwen2.5-1.5b", "smollm2-135m", "mistral-7b-v0.3"],
)
def test_published_models(arch: ModelArch, parameters: int, kv_bytes: int) -> None:
    assert parameter_count(arch) == parameters
    assert kv_bytes_per_token(arch, "bfloat16") == kv_bytes
    assert kv_bytes_per_token(arch, "float32") == 2 * kv_bytes
    scales = 2 * arch.num_layers * arch.num_kv_heads * 4
    assert kv_bytes_per_token(arch, "int8") == kv_bytes // 2 + scales


def test_ranks_share_matrices_and_kv_heads_but_not_norms() -> None:
    norms = 32 * 2 * 4096 + 4096
    whole = parameter_count(LLAMA_3_1_8B)
    for tp in (2, 4, 8):
        assert parameter_count(LLAMA_3_1_8B, tp) - norms == (whole - norms) // tp
        assert kv_bytes_per_token(LLAMA_3_1_8B, "bfloat16", tp) == 131_072 // tp


@settings(deadline=None)
@given(
    block_size=st.integers(1, 256),
    head_dim=st.integers(1, 64).map(lambda half: 2 * half),
    kv_heads=st.integers(1, 8),
    layers=st.integers(1, 40),
    kv_type=st.sampled_from(KvType),
)
def test_compiled_kernels_take_what_is_planned_for_a_block(
    block_size: int, head_dim: int, kv_heads: int, layers: int, kv_type: KvType
) -> None:
    """Planned is a whole number of bytes for a position: less than a byte each more than the block."""
    try:
        library = load()
    except BuildError as error:
        pytest.skip(f"no native kernels here: {error}")
    sizes = AttentionSizes(num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, kv_type=kv_type)
    arch = msgspec.structs.replace(SMOLLM2_135M, num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim)
    planned = block_size * kv_bytes_per_token(arch, kv_type.name.lower(), 1, block_size)
    assert 0 <= planned - layers * kv_block_bytes(library, sizes) < block_size


def test_activations_hold_at_least_the_logits_and_grow_with_the_step() -> None:
    logits = 64 * 128256 * 4
    assert activation_bytes(LLAMA_3_1_8B, "bfloat16", 512, 64) > 2 * logits
    assert activation_bytes(LLAMA_3_1_8B, "bfloat16", 1024, 64) > activation_bytes(LLAMA_3_1_8B, "bfloat16", 512, 64)


# 30 layers of q and o of 576 x 576, k and v of 192 x 576, and three of 1,536 x 576 for the MLP.
SMOLLM2_LAYERS = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
SMOLLM2_TABLE, SMOLLM2_NORMS = 49_152 * 576, 61 * 576


def native_bytes(arch: ModelArch, dtype: str = "bfloat16", tp: int = 1, quantization: str = "auto") -> tuple[int, str]:
    model = ModelConfig(model="m", dtype=dtype, quantization=quantization)  # type: ignore[arg-type]
    return weight_bytes(arch, model, native_kernels=True, has_bfloat16=False, tp=tp)


def smollm2(layers: dict[WeightFormat, int], embedding: WeightFormat) -> ModelArch:
    formats = WeightFormats(layers=layers, embedding=embedding, head=embedding)
    return msgspec.structs.replace(SMOLLM2_135M, formats=formats)


@pytest.mark.parametrize(
    ("weight_format", "dtype", "quantization", "bytes_of_32", "held"),
    [
        ("int4", "bfloat16", "auto", 20, "int4"),  # 16 of codes, two float16: a block of Q4_1
        ("int4", "float32", "auto", 20, "int4"),
        ("int8", "bfloat16", "auto", 34, "int8"),  # 32 of codes, one float16
        ("int4", "float32", "none", 64, "bfloat16"),  # exactly as they are dequantized
        ("int8", "bfloat16", "none", 64, "bfloat16"),
        ("bfloat16", "float32", "auto", 64, "bfloat16"),
        ("float32", "bfloat16", "auto", 64, "bfloat16"),
        ("float16", "float32", "auto", 128, "float32"),
        ("float32", "float32", "auto", 128, "float32"),
    ],
)
def test_compiled_kernels_hold_matrices_as_the_file_does(
    weight_format: WeightFormat, dtype: str, quantization: str, bytes_of_32: int, held: str
) -> None:
    arch = smollm2({weight_format: SMOLLM2_LAYERS}, weight_format)
    size, note = native_bytes(arch, dtype, quantization=quantization)
    assert size == (SMOLLM2_LAYERS + SMOLLM2_TABLE) // 32 * bytes_of_32 + 4 * SMOLLM2_NORMS
    assert note == f"matrices are held as {held}"


def test_the_model_file_takes_what_it_has_on_disk(model_path: Path) -> None:
    """A matrix has as many bytes as its Q4_1 or Q8_0 blocks."""
    arch = read_arch(model_path)
    assert native_bytes(arch)[0] == arch.weight_bytes


def test_ranks_share_each_format_of_a_mixed_file_evenly() -> None:
    arch = smollm2({"int4": SMOLLM2_LAYERS // 2, "int8": SMOLLM2_LAYERS // 2}, "float16")
    size, note = native_bytes(arch, "float32", tp=3)
    layers = SMOLLM2_LAYERS // 2 // 32 * (20 + 34) // 3
    assert size == layers + SMOLLM2_TABLE // 3 * 4 + 4 * SMOLLM2_NORMS
    assert note == "matrices are held as float32, int4, int8"


def test_an_untied_head_and_biases_count_too() -> None:
    # Nothing said of formats: bfloat16. Biases are float32.
    assert native_bytes(LLAMA_3_1_8B)[0] == 2 * 8_030_261_248 + 2 * (2 * 32 + 1) * 4096
    biases = 28 * (12 + 2 * 2) * 128
    norms = (2 * 28 + 1) * 1536
    assert native_bytes(QWEN_2_5_1_5B)[0] == 2 * 1_543_714_304 + 2 * (biases + norms)


def machine_of(available: int) -> Machine:
    return Machine(cores=8, memory_available=available, cpu_features=frozenset({"avx512_bf16"}))


def plan_of(arch: ModelArch, available: int, **model: object) -> Resolved:
    config = Config(model=ModelConfig(model="m", **model))  # type: ignore[arg-type]
    return resolve(config, arch, machine_of(available))


def page(config: Config, arch: ModelArch, machine: Machine) -> str:
    return full_report(config, arch, machine, resolve(config, arch, machine))


def test_the_smallest_tp_grows_as_devices_shrink() -> None:
    config = plan_of(LLAMA_3_1_8B, 64 * GIB, max_model_len=8192).config
    # 15 GiB of bfloat16 weights and 1 GiB of KV: one device of 24 GiB, two of 16 GiB, three of 8 GiB, of which two have
    # 3 of the 8 KV heads each, and a third of everything else: 5.1 GiB of weights.
    assert smallest_tp(config, LLAMA_3_1_8B, 24 * GIB) == 1
    assert smallest_tp(config, LLAMA_3_1_8B, 16 * GIB) == 2
    assert smallest_tp(config, LLAMA_3_1_8B, 8 * GIB) == 3
    assert smallest_tp(config, LLAMA_3_1_8B, GIB // 2) is None


def test_rounded_weights_need_fewer_ranks() -> None:
    config = plan_of(LLAMA_3_1_8B, 64 * GIB, max_model_len=8192).config
    # 4.1 GiB of the layers' int4, 1.0 GiB of int8 and 1 GiB of KV, where floats need three ranks.
    for quantization, expected in (("auto", 3), ("int8", 2), ("int4", 1)):
        model = msgspec.structs.replace(config.model, quantization=quantization)
        worker = msgspec.structs.replace(config.worker, kernels="native")
        rounded = msgspec.structs.replace(config, model=model, worker=worker)
        assert smallest_tp(rounded, LLAMA_3_1_8B, 8 * GIB) == expected


def test_the_full_report_counts_sequences_by_length() -> None:
    resolved = plan_of(SMOLLM2_135M, 8 * GIB, max_model_len=2048)
    text = page(resolved.config, SMOLLM2_135M, machine_of(8 * GIB))
    rows = dict(line.split(" tokens ") for line in text.splitlines() if line.startswith("  ") and " tokens " in line)
    counts = {int(length.replace(",", "")): int(count.replace(",", "")) for length, count in rows.items()}
    assert set(counts) == {512, 1024, 2048}
    for length, count in counts.items():
        assert count == resolved.plan.num_blocks // (length // 16)
    assert "134.5 M parameters" in text
    assert f"{resolved.plan.kv_tokens:,}" in text
    assert str(resolved.plan.num_blocks) in short_report(resolved.plan)


def test_a_host_tier_has_its_line_and_counts() -> None:
    argv = ["--model", "m", "--kv-memory", "1GiB", "--host-kv-memory", "2GiB"]
    config = read_settings(argv, {}, "0").config
    machine = machine_of(8 * GIB)
    resolved = resolve(config, SMOLLM2_135M, machine)
    blocks = 2 * GIB // (16 * 23_040)
    [line] = [line for line in page(config, SMOLLM2_135M, machine).splitlines() if "host" in line]
    assert line.split() == ["host", "KV", "2.00", "GiB", f"({blocks}", "blocks)"]
    assert f"host KV 2.00 GiB ({blocks} blocks)" in short_report(resolved.plan)
    none = plan_of(SMOLLM2_135M, 8 * GIB)
    assert "host" not in page(none.config, SMOLLM2_135M, machine) + short_report(none.plan)

    small = msgspec.structs.replace(machine, memory_available=3 * GIB)
    tight = resolve(config, SMOLLM2_135M, small)
    assert not tight.plan.fits
    text = shortage(config, SMOLLM2_135M, small, tight)
    assert "the host tier 2.00 GiB" in text
    # 3 GiB less what the plan of the same settings takes without the two tiers.
    room = 3 * GIB - (tight.plan.total - tight.plan.kv - 2 * GIB // (16 * 23_040) * 16 * 23_040)
    assert f"--kv-memory and --host-kv-memory of together {room >> 20}MiB or less" in text


def test_a_model_too_large_says_what_helps() -> None:
    resolved = plan_of(LLAMA_3_1_8B, 8 * GIB)
    assert not resolved.plan.fits
    text = shortage(resolved.config, LLAMA_3_1_8B, Machine(cores=8, memory_available=8 * GIB), resolved)
    # 8,030,261,248 parameters of 2 bytes, of which the 128,256 x 4,096 of the head have 4.
    assert "15.9 GiB" in text
    assert "8.00 GiB is available" in text
    assert "smaller model" in text
