"""What `resolve` chooses, refuses and explains."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.machine import Machine
from config.resolve import Resolved, resolve
from config.schema import Config, WeightFormats
from config.shards import can_split
from config.sources import ConfigError, read_settings
from tools.model_shapes import LLAMA_3_1_8B, LLAMA_3_2_1B, SMOLLM2_135M

GIB = 1 << 30
BF16_MACHINE = Machine(cores=4, memory_available=60 * GIB, cpu_features=frozenset({"avx2", "avx512_bf16"}))
OLD_MACHINE = msgspec.structs.replace(BF16_MACHINE, cpu_features=frozenset({"avx2"}))


def settle(*argv: str, arch=SMOLLM2_135M, machine: Machine = BF16_MACHINE) -> Resolved:  # type: ignore[no-untyped-def]
    return resolve(read_settings(["--model", "m", *argv], {}, "0").config, arch, machine)


def reason(resolved: Resolved, name: str) -> str:
    [found] = [text for text in resolved.reasons if text.startswith(name)]
    return found


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ({"avx512_bf16"}, "bfloat16"),
        ({"amx_bf16"}, "bfloat16"),
        ({"avx2", "avx512f"}, "float32"),
    ],
)
def test_the_number_type_follows_the_cpu(features: set[str], dtype: str) -> None:
    resolved = settle(machine=msgspec.structs.replace(BF16_MACHINE, cpu_features=frozenset(features)))
    assert resolved.config.model.dtype == dtype
    assert "bfloat16" in reason(resolved, f"dtype {dtype}")


def test_bfloat16_without_its_instructions_holds_weights_as_float32() -> None:
    asked = settle("--dtype", "bfloat16", machine=OLD_MACHINE)
    assert asked.config.model.dtype == "bfloat16"
    # Of 134,515,008 parameters the embedding has 49,152 x 576 and the 61 norms 576 each; the tied head is a copy.
    small = 49_152 * 576 + 61 * 576
    head = 4 * 49_152 * 576
    assert asked.plan.weights == 2 * small + 4 * (134_515_008 - small) + head
    assert asked.plan.kv_bytes_per_token == 23_040
    assert "held as float32" in asked.plan.weight_note
    with_instructions = settle("--dtype", "bfloat16").plan
    assert with_instructions.weights == 2 * 134_515_008 + head
    assert "held as float32" not in with_instructions.weight_note


def test_the_kv_cache_has_a_number_type_of_its_own_with_compiled_kernels() -> None:
    with_kernels = msgspec.structs.replace(OLD_MACHINE, native_kernels=True)
    # 2 x 30 layers x 3 heads x 64, and for int8 a scale of 4 bytes
    bytes_per_token = {"float32": 46_080, "float16": 23_040, "bfloat16": 23_040, "int8": 12_240}
    for asked, held in [("auto", "float16"), *((dtype, dtype) for dtype in ("float32", "bfloat16", "int8"))]:
        resolved = settle("--kv-dtype", asked, machine=with_kernels)
        assert resolved.config.model.kv_dtype == held
        assert resolved.plan.kv_bytes_per_token == bytes_per_token[held]
    assert "half" in reason(settle(machine=with_kernels), "kv_dtype float16")


def test_plain_torch_keeps_keys_and_values_in_the_dtype_it_computes_in() -> None:
    resolved = settle("--dtype", "bfloat16", "--kernels", "torch")
    assert resolved.config.model.kv_dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"--kv-dtype float16: plain torch operations .* bfloat16; another one needs"):
        settle("--dtype", "bfloat16", "--kernels", "torch", "--kv-dtype", "float16")


def test_the_plan_is_that_of_the_kernels_there_are() -> None:
    with_kernels = msgspec.structs.replace(OLD_MACHINE, native_kernels=True)
    without = msgspec.structs.replace(OLD_MACHINE, kernels_problem="g++ is broken")
    native, plain = settle(machine=with_kernels), settle(machine=without)
    assert native.config.worker.kernels == "native"
    assert native.plan.weights == 2 * 134_515_008 + 2 * 61 * 576
    assert reason(native, "kernels native")
    assert plain.config.worker.kernels == "torch"
    assert reason(plain, "kernels torch").endswith(": g++ is broken")
    for kernels, same in (("native", native), ("torch", plain)):
        for machine in (without, with_kernels):
            asked = settle("--kernels", kernels, machine=machine)
            assert asked.config.worker.kernels == kernels
            assert asked.plan.weights == same.plan.weights
            assert not any(text.startswith("kernels") for text in asked.reasons)


def test_weights_without_quantization_are_planned_as_bfloat16() -> None:
    formats = WeightFormats(layers={"int4": 106_168_320}, embedding="int4", head="int4")
    arch = msgspec.structs.replace(SMOLLM2_135M, formats=formats)
    norms = 4 * 61 * 576
    assert settle("--kernels", "native", arch=arch).plan.weights == (134_515_008 - 61 * 576) * 20 // 32 + norms
    dequantized = settle("--kernels", "native", "--quantization", "none", arch=arch)
    assert dequantized.plan.weights == (134_515_008 - 61 * 576) * 2 + norms
    assert dequantized.config.model.quantization == "none"


@pytest.mark.parametrize(("quantization", "of_32_layer_weights"), [("int8", 34), ("int4", 20)])
def test_floats_that_will_be_rounded_are_planned_as_integers(quantization: str, of_32_layer_weights: int) -> None:
    formats = WeightFormats(layers={"bfloat16": 106_168_320}, embedding="bfloat16", head="bfloat16")
    arch = msgspec.structs.replace(SMOLLM2_135M, formats=formats)
    rounded = settle("--kernels", "native", "--quantization", quantization, arch=arch)
    table, norms = 49_152 * 576 // 32 * 34, 4 * 61 * 576  # the embedding is int8 with both
    assert rounded.plan.weights == 106_168_320 // 32 * of_32_layer_weights + table + norms
    mixed = msgspec.structs.replace(arch, formats=WeightFormats(layers={"int8": 106_168_320}, embedding="int4"))
    kept = settle("--kernels", "native", "--quantization", "int4", arch=mixed)
    assert kept.plan.weight_note == "matrices are held as int4, int8", "what is in integers stays as it is"


def test_plain_torch_operations_take_no_rounded_weights() -> None:
    with pytest.raises(ConfigError, match=r"^--quantization int4: plain torch .* needs the compiled kernels"):
        settle("--kernels", "torch", "--quantization", "int4")


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        (["--threads", "2"], ((0, 4),)),
        (["--threads", "1", "--tp", "2"], ((0,), (4,))),
        (["--threads", "2", "--tp", "2"], ((0, 4), (1, 5))),
    ],
)
def test_threads_are_bound_to_cores_that_no_other_rank_has(argv: list[str], ranks: tuple[tuple[int, ...], ...]) -> None:
    machine = msgspec.structs.replace(BF16_MACHINE, native_kernels=True, core_cpus=(0, 4, 1, 5))
    assert settle(*argv, arch=LLAMA_3_2_1B, machine=machine).rank_cpus == ()
    resolved = settle(*argv, "--pin-threads", arch=LLAMA_3_2_1B, machine=machine)
    assert resolved.rank_cpus == ranks
    assert "rank 0 0" in reason(resolved, "pin_threads")


@pytest.mark.parametrize(
    ("argv", "cpus", "problem"),
    [
        ("--threads 3", (0, 1), "1 rank of --threads 3 needs 3 physical cores, but this process may use 2"),
        ("--threads 2 --tp 2", (0, 1, 2), "2 ranks of --threads 2 need 4 physical cores, but this process may use 3"),
        ("--threads 1", (), "this system does not let a process bind its threads"),
        ("--threads 1 --kernels torch", (0, 1), "only threads of compiled kernels"),
    ],
)
def test_threads_that_cannot_be_bound_are_refused(argv: str, cpus: tuple[int, ...], problem: str) -> None:
    machine = msgspec.structs.replace(BF16_MACHINE, native_kernels=True, core_cpus=cpus)
    with pytest.raises(ConfigError, match=f"^--pin-threads: {problem}"):
        settle("--pin-threads", *argv.split(), arch=LLAMA_3_2_1B, machine=machine)


def test_the_longest_sequence_is_what_the_model_declares_unless_memory_is_short() -> None:
    assert settle().config.model.max_model_len == 8192
    resolved = settle(arch=LLAMA_3_1_8B)
    # 4 GiB, the default limit, at 128 KiB a token.
    assert resolved.config.model.max_model_len == 32768
    assert "131072" in reason(resolved, "max_model_len 32768")


def test_more_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 8193: .* at most 8192 positions"):
        settle("--max-model-len", "8193")


def test_a_length_that_the_given_kv_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 8192: .*--kv-memory 16MiB holds 720 tokens"):
        settle("--max-model-len", "8192", "--kv-memory", "16MiB")
    assert settle("--kv-memory", "16MiB").config.model.max_model_len == 720  # 16 MiB / (16 x 23,040 B) = 45 blocks


@pytest.mark.parametrize("text", ["16", "much", "-1GiB"])
def test_a_kv_memory_that_holds_nothing_or_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-memory"):
        settle(f"--kv-memory={text}")


def test_more_requests_than_tokens_in_a_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-seqs 65: must not be more than --max-step-tokens, which is 64"):
        settle("--max-seqs", "65", "--max-step-tokens", "64")


def test_a_prefill_chunk_beyond_the_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prefill-chunk 600: must not be more than --max-step-tokens, which is 512"):
        settle("--prefill-chunk", "600")


def test_more_ranks_than_heads_are_refused_with_how_many_can_be() -> None:
    with pytest.raises(ConfigError, match=r"^--tp 10: the model's 9 heads .* too few for 10 ranks; possible: 1 to 9$"):
        settle("--tp", "10")
    assert settle("--tp", "9").config.worker.tp == 9


def test_cores_are_shared_among_ranks() -> None:
    assert settle(arch=LLAMA_3_2_1B).config.worker.threads == 4
    assert settle("--tp", "2", arch=LLAMA_3_2_1B).config.worker.threads == 2
    assert settle("--tp", "8", arch=LLAMA_3_2_1B).config.worker.threads == 1
    assert settle("--tp", "2", "--threads", "3", arch=LLAMA_3_2_1B).config.worker.threads == 3


def test_every_rank_has_its_share_of_the_kv_memory() -> None:
    one, two = settle(arch=LLAMA_3_2_1B), settle("--tp", "2", arch=LLAMA_3_2_1B)
    assert two.plan.kv * 2 == one.plan.kv
    assert two.plan.kv_tokens == one.plan.kv_tokens


def test_memory_asked_for_that_is_not_there_is_a_plan_that_does_not_fit() -> None:
    assert not settle("--kv-memory", "64GiB").plan.fits
    assert settle("--kv-memory", "32GiB").plan.fits


BLOCK = 16 * 23_040  # bytes of a block of SmolLM2 in bfloat16


def test_there_is_no_host_tier_unless_asked_for() -> None:
    for shortage in ("wait", "recompute"):
        resolved = settle("--kv-shortage", shortage)
        assert (resolved.plan.num_host_blocks, resolved.config.worker.host_kv_memory) == (0, "0")
        assert not any(text.startswith("host_kv_memory") for text in resolved.reasons)


def test_a_host_tier_holds_whole_blocks_of_the_memory_asked_for() -> None:
    resolved = settle("--host-kv-memory", "1GiB")
    assert resolved.plan.num_host_blocks == GIB // BLOCK
    assert int(resolved.config.worker.host_kv_memory or "") == GIB
    without = settle().plan
    assert resolved.plan.total - without.total == GIB // BLOCK * BLOCK


def test_swapping_has_as_much_host_memory_as_the_kv_cache_or_half_of_what_is_left() -> None:
    resolved = settle("--kv-shortage", "swap", "--kv-memory", "2GiB")
    assert resolved.plan.num_host_blocks == resolved.plan.num_blocks == 2 * GIB // BLOCK
    assert "as much as the KV cache" in reason(resolved, "host_kv_memory")

    large = settle("--kv-shortage", "swap", "--kv-memory", "40GiB")
    left = 60 * GIB - settle("--kv-memory", "40GiB").plan.total
    assert large.plan.num_host_blocks == left // 2 // BLOCK
    assert "half of what memory is left" in reason(large, "host_kv_memory")
    assert large.plan.fits


def test_every_rank_has_its_share_of_the_host_tier() -> None:
    swap = ("--kv-shortage", "swap")
    one, two = settle(*swap, arch=LLAMA_3_2_1B), settle(*swap, "--tp", "2", arch=LLAMA_3_2_1B)
    assert two.plan.host_kv * 2 == one.plan.host_kv
    assert "a rank" in reason(two, "host_kv_memory")


def test_a_host_tier_asked_for_leaves_less_for_the_kv_cache() -> None:
    machine = msgspec.structs.replace(BF16_MACHINE, memory_available=5 * GIB)
    resolved = settle("--host-kv-memory", "3GiB", machine=machine)
    assert resolved.plan.fits
    assert resolved.plan.kv < settle(machine=machine).plan.kv
    assert "what is left" in reason(resolved, "kv_memory")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--host-kv-memory 1KiB", "--host-kv-memory 1KiB: must hold one block of 16 tokens, which takes 360 KiB"),
        ("--host-kv-memory much", "--host-kv-memory: 'much' is not a memory size"),
        ("--kv-shortage swap --host-kv-memory 0", "--kv-shortage swap: .* at least one block, 360 KiB, but .* is 0"),
        ("--kv-shortage swap --no-prefix-cache", "--kv-shortage swap: does not go with --no-prefix-cache"),
        ("--host-kv-memory 1GiB --no-prefix-cache", "--host-kv-memory 1GiB: does not go with --no-prefix-cache"),
    ],
)
def test_a_host_tier_that_is_of_no_use_is_refused(argv: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        settle(*argv.split())


def test_no_host_tier_goes_with_no_prefix_cache() -> None:
    assert settle("--host-kv-memory", "0", "--no-prefix-cache").plan.num_host_blocks == 0


@given(
    available=st.integers(1 << 26, 200 * GIB),
    arch=st.sampled_from([SMOLLM2_135M, LLAMA_3_2_1B, LLAMA_3_1_8B]),
    tp=st.integers(1, 8),
    max_seqs=st.integers(1, 4096),
    block_size=st.integers(1, 256),
    has_bfloat16=st.booleans(),
    shortage=st.sampled_from(["wait", "recompute", "swap"]),
    host_memory=st.sampled_from([None, "64MiB", "3GiB"]),
)
def test_whatever_is_resolved_is_complete_and_consistent(
    available: int,
    arch: object,
    tp: int,
    max_seqs: int,
    block_size: int,
    has_bfloat16: bool,
    shortage: str,
    host_memory: str | None,
) -> None:
    assert isinstance(arch, type(SMOLLM2_135M))
    if not can_split(arch, tp):
        return
    features = frozenset({"avx512_bf16"} if has_bfloat16 else ())
    machine = Machine(cores=4, memory_available=available, cpu_features=features)
    argv = ["--model", "m", "--tp", str(tp), "--max-seqs", str(max_seqs), "--block-size", str(block_size)]
    argv += ["--kv-shortage", shortage, *(["--host-kv-memory", host_memory] if host_memory else [])]
    asked = read_settings(argv, {}, "0").config
    resolved = resolve(asked, arch, machine)
    config, plan = resolved.config, resolved.plan
    assert config.model.max_model_len is not None
    assert 1 <= config.model.max_model_len <= min(arch.max_position, plan.kv_tokens)
    assert None not in (config.scheduler.max_step_tokens, config.scheduler.prefill_chunk, config.worker.threads)
    assert "auto" not in (config.model.dtype, config.worker.device)
    assert config.worker.deterministic is True
    assert plan.num_blocks >= 1
    assert plan.fits == (plan.total <= available)
    assert config.worker.host_kv_memory is not None
    assert (plan.num_host_blocks > 0) == (shortage == "swap" or host_memory is not None)
    # The KV cache alone never makes the plan too large: it is what is left, unless that is useless. A host tier not
    # asked for takes half of what is then left, but at least one block.
    one_block = tp * plan.block_bytes
    chosen_host = tp * plan.host_kv if host_memory is None else 0
    useful = min(512, arch.max_position) * plan.kv_bytes_per_token * tp
    without_kv = plan.total - tp * plan.kv - chosen_host
    if without_kv + useful + one_block <= available:
        assert plan.total - chosen_host <= available
    assert chosen_host <= max((available - plan.total + chosen_host) // 2, one_block)
    # Resolving what is resolved changes nothing.
    again = resolve(config, arch, machine)
    assert again.config == config
    assert again.plan == plan


def test_resolve_does_not_touch_what_it_is_given() -> None:
    config = Config()
    resolve(config, SMOLLM2_135M, BF16_MACHINE)
    assert config == Config()


def test_one_repeat_is_no_loop() -> None:
    with pytest.raises(ConfigError, match="--stop-on-loop 1: must be 0 or at least 2"):
        settle("--stop-on-loop", "1")


def test_names_that_the_server_gives_to_templates_are_not_for_requests() -> None:
    with pytest.raises(ConfigError, match=r"--chat-template-kwargs: .* messages, tools is"):
        settle("--chat-template-kwargs", "thinking,tools,messages")
    assert settle("--chat-template-kwargs", "x").config.server.chat_template_kwargs == ("x",)
