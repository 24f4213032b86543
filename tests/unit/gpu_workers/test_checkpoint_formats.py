"""The same model from GGUF and from safetensors, and checkpoints that are incomplete or damaged."""

import json
import math
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from config.arch import read_arch
from gpu_workers.weights.loader import open_source
from ipc.control import StartError
from tests.unit.gpu_workers.tiny import load_tiny, save_tiny, whole_logits
from tests.unit.gpu_workers.tiny_gguf import save_gguf

TOKENS = random.Random(0).choices(range(131), k=90)
# Rows of 64 and 96 are whole blocks of 32.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1},
        {"family": "qwen2"},
        {"family": "qwen2", "tie_word_embeddings": True},
        {"family": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ],
    ids=str,
)
def test_gguf_and_safetensors_of_one_model_give_the_same_logits(
    settings: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    oracle = save_tiny(tmp_path / "hf", **{**SIZES, **settings})
    save_gguf(oracle, tmp_path / "tiny.gguf")
    actual = load_tiny(tmp_path / "tiny.gguf", kernels=kernels)
    expected = load_tiny(tmp_path / "hf", kernels=kernels)
    assert actual.arch.windows == expected.arch.windows
    assert actual.arch.num_parameters == expected.arch.num_parameters == oracle.num_parameters()
    assert torch.equal(whole_logits(actual, TOKENS), whole_logits(expected, TOKENS))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_quantized_gguf_gives_the_logits_of_its_dequantized_weights(kind: str, tmp_path: Path) -> None:
    """Blocks are rounded to bfloat16 after dequantization; plain types are used as they are."""
    oracle = save_tiny(tmp_path / "hf", **SIZES)
    save_gguf(oracle, tmp_path / "tiny.gguf", kind)
    actual = whole_logits(load_tiny(tmp_path / "tiny.gguf", kernels="torch"), TOKENS)
    oracle_type = gguf.GGMLQuantizationType[kind]
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:  # blocks lie within a row, so the order of rows makes no difference to them
            data = gguf.quants.quantize(tensor.numpy(), oracle_type)
            values = torch.from_numpy(gguf.quants.dequantize(data, oracle_type)).view(tensor.shape)
            tensors[name] = values.bfloat16().float() if kind.startswith("Q") else values
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(actual, whole_logits(load_tiny(tmp_path / "hf", kernels="torch"), TOKENS))


def test_llama3_rope_scaling_comes_from_the_divisors_in_the_gguf(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_type": "llama3", "rope_theta": 50000.0, **scaling}
    oracle = save_tiny(tmp_path / "hf", **SIZES, rope_parameters=rope)
    divisors = []
    for index in range(8):
        turns = 64 / (2 * math.pi * 50000.0 ** (index / 8))
        smooth = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert 1.0 < min(value for value in divisors if value > 1.0) < max(divisors) == 8.0, "all three cases occur"
    save_gguf(oracle, tmp_path / "tiny.gguf", rope_divisors=torch.tensor(divisors, dtype=torch.float32))
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(whole_logits(load_tiny(tmp_path / "tiny.gguf"), TOKENS), expected, rtol=0, atol=1e-4)


def test_a_missing_tensor_is_named_whichever_it_is(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, num_hidden_layers=1, tie_word_embeddings=False, attention_bias=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert set(tensors) == set(oracle.state_dict())
    for name in tensors:
        save_file({key: value for key, value in tensors.items() if key != name}, file)
        with pytest.raises(StartError, match=f"lacks 1 tensors of this model: {name}"):
            load_tiny(tmp_path)


def test_many_missing_tensors_are_counted_and_some_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    save_file({"model.norm.weight": torch.zeros(48)}, tmp_path / "model.safetensors")
    with pytest.raises(StartError, match=r"lacks 29 tensors of this model: model\.embed_tokens.* and 21 more\.$"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, -1])
def test_a_safetensors_file_cut_off_anywhere_is_refused_by_name(kept: float, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(StartError, match=r"model\.safetensors"):
        open_source(tmp_path)


def test_a_shard_that_was_not_downloaded_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path).save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    for read in (read_arch, open_source):
        with pytest.raises((ValueError, StartError), match=f"{shard.name} is missing"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd.safetensors", "../x.safetensors", "sub/x.safetensors", "", ".", "x.bin"])
def test_an_index_names_only_safetensors_files_beside_it(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(StartError, match="is not the name of a safetensors file beside it"):
        open_source(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, "x"])
def test_a_malformed_index_is_refused(weight_map: object, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(StartError, match="weight_map is not an object of file names"):
        open_source(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / name)
    weight_map = {"model.norm.weight": "a.safetensors", "other": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(StartError, match=r"b\.safetensors: tensor model\.norm\.weight is in another file"):
        open_source(tmp_path)


def test_a_tensor_of_integers_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)
    save_file(tensors, file)
    with pytest.raises(StartError, match=r"tensor model\.norm\.weight has the type I8, which is not supported"):
        load_tiny(tmp_path)
