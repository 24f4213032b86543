"""GPTQ and AWQ checkpoints against packers that follow their documentation element by element."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from config.arch import read_arch
from gpu_workers.weights.loader import open_source
from gpu_workers.weights.safetensors import SafetensorsSource
from ipc.control import StartError
from tests.unit.gpu_workers.tiny import load_tiny, save_tiny, whole_logits
from tests.unit.gpu_workers.tiny_packed import pack, pack_model, values, write_checkpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
OUTPUTS, INPUTS = 16, 128


def write_linear(
    path: Path, config: dict[str, Any], groups: list[int], stored_less: int = 0, with_groups: bool = True
) -> torch.Tensor:
    """A checkpoint with one linear `x` of random codes, zeros and scales; the [N, K] float32 values it stands for."""
    rng, bits = np.random.default_rng(0), config["bits"]
    most, num_groups = 2**bits - 1, max(groups) + 1
    codes = rng.integers(0, most + 1, (OUTPUTS, len(groups)))
    zeros = rng.integers(1, most + 1, (OUTPUTS, num_groups))
    if config.get("sym"):
        zeros = np.full_like(zeros, (most + 1) // 2)
    scales = rng.normal(size=zeros.shape).astype(np.float16)
    method = config["quant_method"]
    tensors = pack(method, codes, zeros, scales, groups if with_groups else None, bits, stored_less)
    write_checkpoint(path, {f"x.{part}": tensor for part, tensor in tensors.items()}, config)
    return values(codes, zeros, scales, groups)


def in_order(size: int) -> list[int]:
    return [k // size for k in range(INPUTS)]


@pytest.mark.parametrize(
    ("config", "size", "stored_less"),
    [
        (GPTQ, 64, 1),
        (GPTQ | {"group_size": 32}, 32, 1),
        (GPTQ | {"group_size": 96}, 96, 1),  # the last group is short
        (GPTQ | {"group_size": -1}, INPUTS, 1),
        (GPTQ | {"sym": True}, 64, 1),
        (GPTQ | {"sym": True}, 64, 0),  # written so, against the format, by some versions of GPTQModel
        (GPTQ | {"checkpoint_format": "gptq_v2"}, 64, 0),
        (GPTQ | {"format": "gptq_v2", "checkpoint_format": ""}, 64, 0),
        (GPTQ | {"bits": 8, "sym": True}, 64, 1),
        (AWQ, 64, 0),
        (AWQ | {"group_size": 128, "version": "GEMM"}, 128, 0),
        (AWQ | {"group_size": -1}, INPUTS, 0),
    ],
    ids=str,
)
def test_integers_and_values_are_those_that_were_packed(
    config: dict[str, Any], size: int, stored_less: int, tmp_path: Path
) -> None:
    expected = write_linear(tmp_path, config, in_order(size), stored_less, with_groups=config["quant_method"] == "gptq")
    source = SafetensorsSource(tmp_path)
    assert source.shapes == {"x.weight": (OUTPUTS, INPUTS)}
    weight = source.read_quantized("x.weight")
    assert weight is not None
    assert weight.bits == config["bits"]
    assert weight.codes.dtype == {4: torch.uint8, 8: torch.int8}[config["bits"]]
    assert weight.scales.shape == (OUTPUTS, INPUTS // 32)
    assert (weight.minimums is None) == (config["bits"] == 8)
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(source.read("x.weight"), expected.bfloat16())


def test_words_written_by_hand(tmp_path: Path) -> None:
    """Codes 0..7 of consecutive inputs (GPTQ) and outputs (AWQ) in one word, each hexadecimal digit one code."""
    gptq = torch.full((4, 8), 0x76543210, dtype=torch.int32)
    tensors = {"x.qweight": gptq, "x.qzeros": torch.zeros(1, 1, dtype=torch.int32), "x.scales": torch.ones(1, 8)}
    config = GPTQ | {"group_size": 32}
    weight = SafetensorsSource(write_checkpoint(tmp_path / "gptq", tensors, config)).read("x.weight")
    assert weight[3].tolist() == [code - 1 for code in (0, 1, 2, 3, 4, 5, 6, 7)] * 4
    awq = torch.full((32, 1), 0x75316420, dtype=torch.int32)
    tensors["x.qweight"] = awq
    weight = SafetensorsSource(write_checkpoint(tmp_path / "awq", tensors, AWQ | {"group_size": 32})).read("x.weight")
    assert weight[:, 9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_in_the_order_of_their_activations_are_dequantized(bits: int, tmp_path: Path) -> None:
    groups = np.random.default_rng(1).permutation(in_order(32)).tolist()
    config = GPTQ | {"bits": bits, "group_size": 32, "desc_act": True}
    expected = write_linear(tmp_path, config, groups, 1)
    source = SafetensorsSource(tmp_path)
    assert source.read_quantized("x.weight") is None
    assert torch.equal(source.read("x.weight"), expected.bfloat16())


def test_an_order_that_changes_nothing_leaves_the_integers(tmp_path: Path) -> None:
    expected = write_linear(tmp_path, GPTQ | {"desc_act": True}, in_order(64), 1)
    weight = SafetensorsSource(tmp_path).read_quantized("x.weight")
    assert weight is not None
    assert torch.equal(weight.dequantize(), expected)


def test_inputs_that_are_no_whole_number_of_32_are_dequantized(tmp_path: Path) -> None:
    expected = write_linear(tmp_path, GPTQ, [k // 64 for k in range(72)], 1)
    source = SafetensorsSource(tmp_path)
    assert source.shapes == {"x.weight": (OUTPUTS, 72)}
    assert source.read_quantized("x.weight") is None
    assert torch.equal(source.read("x.weight"), expected.bfloat16())


def test_zeros_of_8_bits_are_dequantized(tmp_path: Path) -> None:
    """An int8 weight has no minimums."""
    expected = write_linear(tmp_path, GPTQ | {"bits": 8}, in_order(64), 1)
    source = SafetensorsSource(tmp_path)
    assert source.read_quantized("x.weight") is None
    assert torch.equal(source.read("x.weight"), expected.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x.qzeros": None}, r"x\.qzeros is missing"),
        ({"x.scales": None}, r"x\.scales is missing"),
        ({"x.scales": torch.ones(3, OUTPUTS)}, r"x\.scales is \[3, 16\] instead of \[2, 16\]: .* group_size 64"),
        ({"x.qzeros": torch.zeros(2, 4, dtype=torch.int32)}, r"x\.qzeros is \[2, 4\] instead of \[2, 2\]: .* bits 4"),
        ({"x.g_idx": torch.zeros(9, dtype=torch.int32)}, r"x\.g_idx is \[9\] instead of \[128\]"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_tensors_that_do_not_fit_together_are_named(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    write_linear(tmp_path, GPTQ, in_order(64), 1)
    tensors = {**load_file(tmp_path / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(StartError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize("group", [-1, 2])
def test_a_group_that_does_not_exist_is_refused(group: int, tmp_path: Path) -> None:
    write_linear(tmp_path, GPTQ, in_order(64), 1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["x.g_idx"][5] = group
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for read in (source.read, source.read_quantized):
        with pytest.raises(ValueError, match=r"x\.g_idx has values outside of its 2 groups"):
            read("x.weight")


def test_packed_tensors_need_the_configuration_that_explains_them(tmp_path: Path) -> None:
    write_linear(tmp_path, GPTQ, in_order(64), 1)
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        StartError, match=r"tensors are packed \(\.qweight\), but .*config\.json has no quantization_co"
    ):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (GPTQ | {"group_size": 32}, {}),
        (GPTQ | {"group_size": 32, "sym": True}, {"family": "qwen2", "tie_word_embeddings": True}),
        (GPTQ | {"bits": 8, "group_size": -1, "sym": True}, {"attention_bias": True}),
        (AWQ | {"group_size": 32}, {}),
    ],
    ids=["gptq", "gptq-qwen2", "gptq-8-bit", "awq"],
)
def test_a_packed_model_gives_the_logits_of_its_dequantized_weights(
    config: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    for name in ("packed", "plain"):
        save_tiny(tmp_path / name, **sizes, **settings)
    dequantized = pack_model(tmp_path / "packed", config)
    assert read_arch(tmp_path / "packed").formats.layers == {f"int{config['bits']}": 2 * (64 * 64 * 3 + 3 * 64 * 96)}
    rounded = {
        name: tensor.bfloat16().float() if name.endswith("_proj.weight") else tensor
        for name, tensor in dequantized.items()
    }
    save_file(rounded, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    tokens = [5, 17, 99, 3, 3, 64, 120, 0]
    packed, plain = (load_tiny(tmp_path / name, kernels="torch") for name in ("packed", "plain"))
    assert torch.equal(whole_logits(packed, tokens), whole_logits(plain, tokens))


def test_a_bias_that_is_not_zero_is_not_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.bias"
    save_file({**tensors, name: torch.zeros(112)}, file, metadata={"format": "pt"})
    load_tiny(tmp_path)
    save_file({**tensors, name: torch.eye(112)[3]}, file, metadata={"format": "pt"})
    with pytest.raises(StartError, match=f"does not know: {name}"):
        load_tiny(tmp_path)
