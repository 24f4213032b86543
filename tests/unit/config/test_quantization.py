"""`quantization_config` as quantizers write it, and the formats of matrices in checkpoints."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from config.arch import read_arch
from config.quantization import Quantization, read_quantization
from config.schema import WeightFormat, WeightFormats
from tests.unit.config.test_arch import edit
from tests.unit.gpu_workers.tiny import save_tiny
from tests.unit.gpu_workers.tiny_gguf import save_gguf
from tests.unit.gpu_workers.tiny_packed import pack_model

# As published with ModelCloud/Qwen2.5-0.5B-Instruct-gptqmodel-w4a16 and by AutoAWQ.
GPTQ: dict[str, Any] = {
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
    "quant_method": "gptq",
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:5.0.0-dev0"], "damp_percent": 0.05, "static_groups": False},
}
AWQ: dict[str, Any] = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTQ, Quantization(method="gptq", bits=4, group_size=32, symmetric=True, zero_offset=1)),
        (
            GPTQ | {"bits": 8, "group_size": -1, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
            Quantization(method="gptq", bits=8, group_size=None, reordered=True),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128},  # before there were formats to choose from
            Quantization(method="gptq", bits=4, group_size=128, zero_offset=1),
        ),
        (
            GPTQ | {"dynamic": {r"-:model\.layers\.1\..*": {}}},
            Quantization(method="gptq", bits=4, group_size=32, symmetric=True, zero_offset=1),
        ),
        (AWQ, Quantization(method="awq", bits=4, group_size=128)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, Quantization(method="awq", bits=4, group_size=64)),
    ],
)
def test_what_quantizers_write(config: dict[str, Any], expected: Quantization) -> None:
    assert read_quantization({"quantization_config": config}, "config.json") == expected


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_most_checkpoints_have_none(config: dict[str, Any]) -> None:
    assert read_quantization(config, "config.json") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1], "is not an object"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; supported: gptq, awq"),
        ({"bits": 4}, "quant_method None is not supported"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        (GPTQ | {"bits": "4"}, "bits '4' is not supported"),
        (AWQ | {"bits": 8}, "bits 8 is not supported; supported: 4"),
        (GPTQ | {"group_size": 16}, "group_size 16 is not supported; supported: multiples of 32, -1"),
        (GPTQ | {"group_size": 0}, "group_size 0 is not supported"),
        (GPTQ | {"group_size": "128"}, "group_size '128' is not supported"),
        (GPTQ | {"sym": "yes"}, "sym is 'yes', not true or false"),
        (GPTQ | {"desc_act": 1}, "desc_act is 1, not true or false"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2",
        ),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format True is not supported"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported; supported: int32"),
        (GPTQ | {"dynamic": {".*": {"bits": 8}}}, "dynamic is not supported"),
        (GPTQ | {"dynamic": [1]}, "dynamic is not supported"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        (AWQ | {"zero_point": False}, "zero_point False is not supported; supported: True"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config\.json: quantization_config:? {message}"):
        read_quantization({"quantization_config": config}, "config.json")


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
LAYERS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)  # elements of q, o; k, v; gate, up, down


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {"int4": LAYERS}),
        ({"desc_act": True}, {"bfloat16": LAYERS}),
        ({"bits": 8}, {"int8": LAYERS}),
        ({"bits": 8, "sym": False}, {"bfloat16": LAYERS}),
    ],
    ids=str,
)
def test_packed_linears_count_as_the_format_they_will_be_read_in(
    changes: dict[str, Any], layers: dict[str, int], tmp_path: Path
) -> None:
    oracle = save_tiny(tmp_path, **SIZES)
    pack_model(tmp_path, GPTQ | changes)
    arch = read_arch(tmp_path)
    minimums = not changes.get("sym", True)
    assert arch.formats == WeightFormats(layers=layers, embedding="float32", head="float32", has_minimums=minimums)
    biases = 2 * (64 + 2 * 32 + 64 + 2 * 96 + 64)  # AutoGPTQ's, of zeros
    assert arch.num_parameters == oracle.num_parameters() + biases
    assert arch.weight_bytes < 4 * oracle.num_parameters()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_safetensors_have_the_format_of_their_numbers(dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, **SIZES, tie_word_embeddings=True).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    assert read_arch(tmp_path).formats == WeightFormats(layers={dtype: LAYERS}, embedding=dtype, head=dtype)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Q4_0", "int4"),
        ("Q4_1", "int4"),
        ("Q8_0", "int8"),
        ("F16", "float16"),
        ("BF16", "bfloat16"),
        ("F32", "float32"),
    ],
)
def test_gguf_matrices(kind: str, expected: str, tmp_path: Path) -> None:
    save_gguf(save_tiny(tmp_path, **SIZES, tie_word_embeddings=True), tmp_path / "x.gguf", kind)
    arch = read_arch(tmp_path / "x.gguf")
    minimums = kind != "Q4_0"
    assert arch.formats == WeightFormats(
        layers={expected: LAYERS}, embedding=expected, head=expected, has_minimums=minimums
    )


@pytest.mark.parametrize(
    ("config", "group", "has_minimums"),
    [
        (None, 32, True),
        (GPTQ, 32, False),
        (GPTQ | {"group_size": 128, "sym": False}, 128, True),
        (GPTQ | {"group_size": -1}, 1 << 30, False),
        (AWQ, 128, True),
    ],
)
def test_without_files_the_config_says_in_which_formats_they_would_be(
    config: dict[str, Any] | None, group: int, has_minimums: bool, tmp_path: Path
) -> None:
    oracle = save_tiny(tmp_path, **SIZES)
    edit(tmp_path, quantization_config=config, dtype="float16")
    (tmp_path / "model.safetensors").unlink()
    arch = read_arch(tmp_path, needs_weights=False)
    layers = "float16" if config is None else "int4"
    assert arch.formats == WeightFormats(
        layers={layers: 1}, embedding="float16", head="float16", group=group, has_minimums=has_minimums
    )
    assert (arch.num_parameters, arch.weight_bytes) == (oracle.num_parameters(), 0)
    with pytest.raises(ValueError, match=r"there are no \.safetensors files"):
        read_arch(tmp_path)


def test_files_that_are_there_are_looked_into_also_where_they_need_not_be(tmp_path: Path) -> None:
    save_tiny(tmp_path, **SIZES)
    assert read_arch(tmp_path, needs_weights=False) == read_arch(tmp_path)


def test_gguf_files_mix_formats(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    for name, rows, kind in (
        ("token_embd", 10, "Q8_0"),
        ("output", 10, "F16"),
        ("blk.0.attn_q", 64, "Q4_0"),
        ("blk.0.attn_k", 64, "Q4_1"),
        ("blk.0.attn_v", 64, "Q4_1"),
        ("blk.0.attn_output", 64, "Q8_0"),
        # Held as one matrix, so in one format.
        ("blk.0.ffn_gate", 64, "Q4_0"),
        ("blk.0.ffn_up", 64, "F16"),
    ):
        kind_id = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(np.ones((rows, 64), np.float32), kind_id)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind_id)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    formats = read_arch(tmp_path / "x.gguf").formats
    layers: dict[WeightFormat, int] = {"int4": 3 * 64 * 64, "int8": 64 * 64, "bfloat16": 64 * 64, "float16": 64 * 64}
    assert formats == WeightFormats(layers=layers, embedding="int8", head="float16")


def test_a_directory_with_an_unsupported_quantization_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"config\.json: quantization_config: quant_method 'fp8' is not supported"):
        read_arch(tmp_path)
