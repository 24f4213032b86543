"""Arithmetic of the memory plan, against the sizes that the model authors publish."""

import msgspec
import pytest

from config.memory_plan import (
    activation_bytes,
    can_split,
    full_report,
    kv_bytes_per_token,
    parameter_count,
    short_report,
    shortage,
    smallest_tp,
)
from config.resolve import Machine, Resolved, resolve
from config.schema import Config, ModelArch, ModelConfig
from config.sources import read_settings

GIB = 1 << 30

# From the config.json of each model's repository.
LLAMA_3_1_8B = ModelArch(
    family="llama",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position=131072,
)
LLAMA_3_2_1B = ModelArch(
    family="llama",
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=8192,
    vocab_size=128256,
    max_position=131072,
    tie_embeddings=True,
)
QWEN_2_5_1_5B = ModelArch(
    family="qwen2",
    hidden_size=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=8960,
    vocab_size=151936,
    max_position=131072,
    tie_embeddings=True,
    qkv_bias=True,
)
SMOLLM2_135M = ModelArch(
    family="llama",
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_position=8192,
    tie_embeddings=True,
)
MISTRAL_7B_V03 = ModelArch(
    family="mistral",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=32768,
    max_position=32768,
)


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


def test_ranks_share_matrices_and_kv_heads_but_not_norms() -> None:
    norms = 32 * 2 * 4096 + 4096
    whole = parameter_count(LLAMA_3_1_8B)
    for tp in (2, 4, 8):
        assert parameter_count(LLAMA_3_1_8B, tp) - norms == (whole - norms) // tp
        assert kv_bytes_per_token(LLAMA_3_1_8B, "bfloat16", tp) == 131_072 // tp


def test_which_degrees_divide() -> None:
    assert [tp for tp in range(1, 17) if can_split(SMOLLM2_135M, tp)] == [1, 3]
    assert [tp for tp in range(1, 17) if can_split(LLAMA_3_1_8B, tp)] == [1, 2, 4, 8]
    assert [tp for tp in range(1, 17) if can_split(QWEN_2_5_1_5B, tp)] == [1, 2]


def test_activations_hold_at_least_the_logits_and_grow_with_the_step() -> None:
    logits = 64 * 128256 * 4
    assert activation_bytes(LLAMA_3_1_8B, "bfloat16", 512, 64) > 2 * logits
    assert activation_bytes(LLAMA_3_1_8B, "bfloat16", 1024, 64) > activation_bytes(LLAMA_3_1_8B, "bfloat16", 512, 64)


def plan_of(arch: ModelArch, available: int, **model: object) -> Resolved:
    machine = Machine(
        cores=8, memory_total=available, memory_available=available, cpu_features=frozenset({"avx512_bf16"})
    )
    return resolve(Config(model=ModelConfig(model="m", **model)), arch, machine)  # type: ignore[arg-type]


def test_the_smallest_tp_grows_as_devices_shrink() -> None:
    config = plan_of(LLAMA_3_1_8B, 64 * GIB, max_model_len=8192).config
    # 15 GiB of bfloat16 weights and 1 GiB of KV: two 16 GiB devices, four of 8 GiB, one of 24 GiB.
    assert smallest_tp(config, LLAMA_3_1_8B, 24 * GIB) == 1
    assert smallest_tp(config, LLAMA_3_1_8B, 16 * GIB) == 2
    assert smallest_tp(config, LLAMA_3_1_8B, 8 * GIB) == 4
    assert smallest_tp(config, LLAMA_3_1_8B, GIB // 2) is None


def test_the_full_report_counts_sequences_by_length() -> None:
    resolved = plan_of(SMOLLM2_135M, 8 * GIB, max_model_len=2048)
    text = full_report(resolved.plan, resolved.config, SMOLLM2_135M)
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
    machine = Machine(cores=8, memory_total=8 * GIB, memory_available=8 * GIB, cpu_features=frozenset({"avx512_bf16"}))
    resolved = resolve(config, SMOLLM2_135M, machine)
    blocks = 2 * GIB // (16 * 23_040)
    [line] = [line for line in full_report(resolved.plan, resolved.config, SMOLLM2_135M).splitlines() if "host" in line]
    assert line.split() == ["host", "KV", "2.00", "GiB", f"({blocks}", "blocks)"]
    assert f"host KV 2.00 GiB ({blocks} blocks)" in short_report(resolved.plan)
    none = plan_of(SMOLLM2_135M, 8 * GIB)
    assert "host" not in full_report(none.plan, none.config, SMOLLM2_135M) + short_report(none.plan)

    tight = resolve(config, SMOLLM2_135M, msgspec.structs.replace(machine, memory_available=3 * GIB))
    assert not tight.plan.fits
    text = shortage(tight.plan, tight.config)
    assert "the host tier 2.00 GiB" in text
    # 3 GiB less what the plan of the same settings takes without the two tiers.
    room = 3 * GIB - (tight.plan.total - tight.plan.kv - 2 * GIB // (16 * 23_040) * 16 * 23_040)
    assert f"--kv-memory and --host-kv-memory of together {room >> 20}MiB or less" in text


def test_a_model_too_large_says_what_helps() -> None:
    resolved = plan_of(LLAMA_3_1_8B, 8 * GIB)
    assert not resolved.plan.fits
    text = shortage(resolved.plan, resolved.config)
    # 8,030,261,248 parameters of 2 bytes, of which the 128,256 x 4,096 of the head have 4.
    assert "15.9 GiB" in text
    assert "8.00 GiB is available" in text
    assert "smaller model" in text
