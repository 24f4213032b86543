"""Reading checkpoints: dequantization against the gguf package, name and shape checks, scoring of reference rows."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from config.arch import read_arch
from config.gguf_file import GGUFFile
from gpu_workers.weights.gguf import dequantize
from ipc.control import StartError
from tests.unit.gpu_workers.tiny import load_tiny, save_tiny, whole_logits
from tools.score.model import load
from tools.score.reference import TOLERANCES, score_rows

QUANTIZED = ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"]
TOKENS = [5, 17, 99, 3, 3, 64, 120, 0]


@pytest.mark.parametrize("kind", [*QUANTIZED, "F32"])
def test_dequantization_is_bit_for_bit_that_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    oracle_type = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(7, 96)).astype(np.float32)
    data = gguf.quants.quantize(values, oracle_type)
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=oracle_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    info = GGUFFile(path).tensors["t"]
    raw = bytearray(path.read_bytes()[info.offset : info.offset + info.num_bytes])
    actual = dequantize(info, torch.frombuffer(raw, dtype=torch.uint8))
    assert np.array_equal(actual.float().numpy(), gguf.quants.dequantize(data, oracle_type).reshape(7, 96))


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t.weight", np.zeros((1, 210), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"t\.weight has the type Q6_K"):
        dequantize(GGUFFile(path).tensors["t.weight"], torch.zeros(210, dtype=torch.uint8))


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path / "one")
    oracle.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert torch.equal(
        whole_logits(load_tiny(tmp_path / "many"), TOKENS), whole_logits(load_tiny(tmp_path / "one"), TOKENS)
    )
    assert read_arch(tmp_path / "many").num_parameters == oracle.num_parameters()


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        ({name: None}, f"lacks 1 tensors of this model: {name}"),
        ({"model.extra.weight": torch.zeros(2)}, "does not know: model.extra.weight"),
        ({name: torch.zeros(3, 48)}, r"is \[3, 48\] instead of \[112, 48\]"),
    ):
        tensors = {key: value for key, value in {**good, **change}.items() if value is not None}
        save_file(tensors, file)
        with pytest.raises(StartError, match=message):
            load_tiny(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    index = {"weight_map": {"model.norm.weight": "../model/model.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not the name of a safetensors file beside it"):
        read_arch(tmp_path / "model")


def _reference(shared_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (shared_dir / "reference" / "greedy.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_short_reference_rows(dtype: str, model_path: Path, shared_dir: Path) -> None:
    rows = sorted(_reference(shared_dir), key=lambda row: len(row["prompt_ids"]) + len(row["output_ids"]))[:8]  # type: ignore[arg-type]
    result = score_rows(load(model_path, dtype, 1), rows, TOLERANCES[dtype])
    assert (result.rows_ok, result.mismatches) == (8, [])
    assert max(result.errors) < {"float32": 5e-4, "bfloat16": 1.0}[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_reference_rows(dtype: str, model_path: Path, shared_dir: Path) -> None:
    result = score_rows(load(model_path, dtype, 1), _reference(shared_dir), TOLERANCES[dtype])
    assert (result.rows_ok, result.mismatches) == (40, [])
