"""What is advised about a plan that does not fit: whoever does it has one that fits."""

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.bytesize import format_size
from config.gpu_cards import planned_gpu
from config.machine import Machine
from config.plan_advice import Way, shortage, ways_out
from config.resolve import resolve
from config.schema import Config, ModelArch, WeightFormats
from config.sources import ConfigError, read_settings
from tools.model_shapes import LLAMA_3_1_8B, LLAMA_3_2_1B, QWEN_2_5_1_5B, SMOLLM2_135M

GIB = 1 << 30


def machine_with(gpu: str, free: float = 1.0, memory: int = 64 * GIB) -> Machine:
    card = planned_gpu(gpu)
    card = msgspec.structs.replace(card, free_bytes=int(free * card.total_bytes))
    return Machine(cores=8, memory_available=memory, gpus=(card,))


def read(*argv: str) -> Config:
    return read_settings(["--model", "m", *argv], {}, "0").config


def advice(*argv: str, machine: Machine, arch: ModelArch = LLAMA_3_1_8B) -> str:
    config = read(*argv)
    return shortage(config, arch, machine, resolve(config, arch, machine))


def config_of(argv: list[str], way: Way) -> Config:
    """With the flags of the text behind the others."""
    flags = [part for found in re.findall(r"(--[a-z0-9-]+)(?: ([A-Za-z0-9.]+))?", way.text) for part in found if part]
    return read(*argv, *flags)


def follow(argv: list[str], way: Way) -> bool:
    """Whether the plan fits once the flags in the text stand behind the others."""
    return resolve(config_of(argv, way), way.arch, way.machine).plan.fits


@settings(max_examples=150)
@given(
    arch=st.sampled_from([SMOLLM2_135M, LLAMA_3_2_1B, QWEN_2_5_1_5B, LLAMA_3_1_8B]),
    layers=st.sampled_from(["bfloat16", "int8", "int4"]),
    memory=st.floats(1, 40),
    free=st.sampled_from([1.0, 0.5, 0.1, 0.0]),
    host=st.sampled_from([64.0, 4.0, 1.0]),
    argv=st.tuples(
        st.sampled_from(["", "--max-model-len 8192", "--max-model-len 513", "--max-model-len 300"]),
        st.sampled_from(["", "--max-seqs 1", "--max-seqs 500"]),
        st.sampled_from(["", "--max-step-tokens 8192", "--prefill-chunk 512"]),
        st.sampled_from(["", "--kv-dtype fp8", "--kv-dtype int8"]),
        st.sampled_from(["", "--kv-memory 30GiB"]),
        st.sampled_from(["", "--cuda-graphs", "--no-cuda-graphs", "--max-graph-seqs 64"]),
        st.sampled_from(["", "--kv-shortage swap", "--host-kv-memory 3GiB"]),
        st.sampled_from(["", "--quantization none"]),
        st.sampled_from(["", "--gpu-memory-share 0.5", "--gpu-memory-share 0.943", "--block-size 200"]),
    ),
    elsewhere=st.booleans(),
)
def test_every_way_out_fits(
    arch: ModelArch, layers: str, memory: float, free: float, host: float, argv: tuple[str, ...], elsewhere: bool
) -> None:
    flags = " ".join(argv).split()
    machine = machine_with(f"{memory}GiB", free, int(host * GIB))
    machine = msgspec.structs.replace(machine, plans_elsewhere=elsewhere)
    arch = msgspec.structs.replace(arch, formats=WeightFormats(layers={layers: 1}))  # type: ignore[dict-item]
    config = read(*flags)
    try:
        resolved = resolve(config, arch, machine)
    except ConfigError:
        return  # such settings contradict each other, wherever they are used
    if resolved.plan.fits:
        return
    ways = ways_out(config, arch, machine)
    assert ways, "a larger GPU always helps"
    for way in ways:
        assert way.fits
        assert follow(flags, way)
        for said in re.findall(r"4-bit weights .*?, which saves ([\d.]+ \w+)", way.text):
            lighter = resolve(config_of(flags, way), way.arch, machine).plan.weights
            assert lighter < resolved.plan.weights
            assert said == format_size(resolved.plan.weights - lighter)
        for said in re.findall(r"--quantization int\d, which saves ([\d.]+ \w+) of weights", way.text):
            lighter = resolve(config_of(flags, way), way.arch, machine).plan.weights
            assert said == format_size(resolved.plan.weights - lighter)
        for new, old in re.findall(r"KV takes ([\d.]+ \w+) instead of ([\d.]+ \w+)", way.text):
            then = resolve(config_of(flags, way), way.arch, way.machine).plan.kv_bytes_per_token
            assert (new, old) == (format_size(then), format_size(resolved.plan.kv_bytes_per_token))
            assert then < resolved.plan.kv_bytes_per_token
    text = shortage(config, arch, machine, resolved)
    assert "\n" not in text
    assert all(way.text in text for way in ways)


def test_what_is_short_is_told_in_one_paragraph() -> None:
    arch = msgspec.structs.replace(LLAMA_3_1_8B, name="Llama-3.1-8B")
    text = advice("--max-model-len", "32768", "--max-seqs", "64", machine=machine_with("16GiB"), arch=arch)
    assert text.startswith(
        "Llama-3.1-8B with sequences of 32768 tokens, up to 64 at once, is 5.69 GiB short on a GPU of 16.0 GiB: "
        "weights take 15.0 GiB, the KV cache of 32768 tokens 4.00 GiB, "
    )
    assert "only 14.4 GiB of 16.0 GiB may be used. Do one of these: " in text
    # The weights alone are too large.
    assert "--max-model-len" not in text
    assert "the same model with 4-bit weights (GPTQ, AWQ, or a GGUF file of Q4_0, Q4_1 or Q4_K), which saves" in text
    assert text.endswith("a GPU with 23 GiB of memory, such as RTX4090.")


def test_settings_that_help_alone_are_turned_no_further_than_needed() -> None:
    arch, machine = LLAMA_3_1_8B, machine_with("21GiB")
    text = advice("--max-model-len", "32768", "--max-seqs", "64", machine=machine)
    assert "--kv-dtype fp8, in which a token's KV takes 66.0 KiB instead of 128 KiB; " in text
    found = re.search(r"--max-model-len (\d+)", text)
    assert found is not None
    fitting = int(found[1])
    for length, fits in ((fitting, True), (fitting + 256, False)):
        config = read("--max-model-len", str(length), "--max-seqs", "64")
        assert resolve(config, arch, machine).plan.fits is fits
    assert "--max-seqs" not in text.partition("Do one of these")[2]  # a few less don't help


def test_settings_that_help_only_together_are_named_together() -> None:
    asked = ["--max-model-len", "8192", "--max-seqs", "512", "--kv-dtype", "fp8"]
    ways = ways_out(read(*asked), LLAMA_3_1_8B, machine_with("18GiB"))
    together = ways[0].text
    assert together.count("--") > 1
    assert follow(asked, ways[0])
    for part in together.split(", and "):
        others = [other for other in together.split(", and ") if other != part]
        assert not follow(asked, msgspec.structs.replace(ways[0], text=", and ".join(others))), f"{part} is in vain"


def test_other_programs_on_the_gpu_are_told() -> None:
    text = advice(machine=machine_with("24GiB", free=0.5))
    assert "12.0 GiB of 24.0 GiB may be used, since 12.0 GiB are in use" in text
    assert "ending the other programs on this GPU, which hold 12.0 GiB" in text


def test_a_machine_that_is_short_is_told_apart_from_its_gpu() -> None:
    asked = ("--host-kv-memory", "8GiB", "--kv-memory", "1GiB")
    text = advice(*asked, machine=machine_with("80GiB", memory=4 * GIB))
    assert text.startswith("The engine needs about 9.77 GiB of the machine's own memory, 8.00 GiB of it for the host ")
    helps = text.partition("Do one of these: ")[2]
    assert re.fullmatch(r"--host-kv-memory 22\d\dMiB; a machine with 10 GiB of free memory\.", helps)
    both = advice(*asked, machine=machine_with("16GiB", memory=4 * GIB))
    assert "short on a GPU of 16.0 GiB" in both
    assert "a machine with 10 GiB of free memory, and the same model with 4-bit weights" in both


@pytest.mark.parametrize("share", ["0.05", "0.5", "0.66", "0.685"])
def test_a_larger_share_is_named_and_no_larger_than_needed(share: str) -> None:
    machine, asked = machine_with("24GiB"), ["--max-model-len", "512"]
    text = advice(*asked, "--gpu-memory-share", share, machine=machine)
    found = re.search(r"Do one of these: --gpu-memory-share (0\.\d+); ", text)
    assert found is not None
    percent = round(100 * float(found[1]))
    for value, fits in ((percent, True), (percent - 1, False)):
        config = read(*asked, "--gpu-memory-share", str(value / 100))
        assert resolve(config, LLAMA_3_1_8B, machine).plan.fits is fits


@pytest.mark.parametrize(
    ("share", "free"),
    [
        ("0.5", 0.5),  # other programs hold the rest
        ("0.95", 1.0),
        ("1", 1.0),
    ],
)
def test_a_larger_share_that_does_not_help_is_not_named(share: str, free: float) -> None:
    flags = ["--max-model-len", "8192", "--gpu-memory-share", share]
    text = advice(*flags, machine=machine_with("17GiB", free=free))
    assert "--gpu-memory-share" not in text.partition("Do one of these: ")[2]


def test_smaller_keys_are_not_named_where_the_size_of_the_kv_cache_is_given() -> None:
    text = advice("--kv-memory", "8GiB", "--max-seqs", "1000", machine=machine_with("21GiB"))
    assert re.search(r"--kv-memory \d+MiB; ", text.partition("Do one of these: ")[2])
    assert "--kv-dtype" not in text


def test_4_bit_weights_are_named_with_what_keeps_them_so() -> None:
    asked, machine = ["--max-model-len", "8192"], machine_with("16GiB")
    text = advice(*asked, machine=machine)
    assert "the same model with 4-bit weights" in text
    assert "--quantization auto" not in text
    dequantized = advice(*asked, "--quantization", "none", machine=machine)
    assert "--quantization auto, and the same model with 4-bit weights" in dequantized
    saved = re.compile(r"which saves ([^;]+);")
    assert saved.findall(dequantized) == saved.findall(text)
    assert saved.findall(text)[2] == "8.94 GiB"


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_rounding_float_weights_is_named_with_what_it_saves(quantization: str) -> None:
    argv = ["--max-model-len", "8192", "--quantization", quantization]
    text = advice(*argv, machine=machine_with("16GiB"))
    saved = dict(re.findall(r"--quantization (int\d), which saves ([\d.]+) GiB of weights", text))
    # 6.98e9 weights of layers and 0.525e9 of the head, of 16 bits; 32 of them share scales (kernels.gpu.pack).
    layers, head = 6_979_321_856 / GIB, 525_336_576 / GIB
    assert float(saved["int8"]) == pytest.approx((layers + head) * (2 - 34 / 32), rel=0.001)
    assert float(saved["int4"]) == pytest.approx(layers * (2 - 20 / 32) + head * (2 - 34 / 32), rel=0.001)
    assert "--quantization int" not in advice(*argv[:2], "--quantization", "int8", machine=machine_with("8GiB"))


def test_on_a_cpu_rounding_is_named_where_the_plan_fits_then() -> None:
    machine = Machine(cores=2, memory_available=13 * GIB, native_kernels=True)
    text = advice("--max-model-len", "2048", "--device", "cpu", machine=machine)
    assert re.search(
        r"What helps: --quantization int8, which saves [\d.]+ GiB of weights, or --quantization int4", text
    )
    machine = msgspec.structs.replace(machine, memory_available=7 * GIB)
    text = advice("--max-model-len", "2048", "--device", "cpu", machine=machine)
    assert "--quantization int8" not in text
    assert "--quantization int4" in text


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_weights_that_are_integers_already_can_only_be_left_so(quantization: str) -> None:
    arch = msgspec.structs.replace(LLAMA_3_1_8B, formats=WeightFormats(layers={"int4": 1}))
    text = advice("--max-model-len", "2048", "--quantization", quantization, machine=machine_with("8GiB"), arch=arch)
    assert "4-bit weights" not in text
    assert ("--quantization auto" in text) is (quantization == "none")


def test_a_fitting_plan_needs_no_advice() -> None:
    assert ways_out(read(), LLAMA_3_1_8B, machine_with("80GiB")) == []
