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
from config.weight_formats import gguf_formats
from gpu_workers.weights.gguf import GGUFSource, dequantize
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


# Bytes of a block, and where it has float16 numbers: kept small, for neither NaN nor infinity.
RANDOM_BLOCKS = {
    "Q5_0": (22, [0]),
    "Q5_1": (24, [0, 2]),
    "Q2_K": (84, [80, 82]),
    "Q3_K": (110, [108]),
    "Q4_K": (144, [0, 2]),
    "Q5_K": (176, [0, 2]),
    "Q6_K": (210, [208]),
    "IQ4_NL": (18, [0]),
    "IQ4_XS": (136, [0]),
}


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """[rows, bytes] of blocks of random bytes, so that every code occurs, also those that no quantizer writes."""
    size, halves = RANDOM_BLOCKS[kind]
    data = np.random.default_rng(0).integers(0, 256, (rows, blocks, size), np.uint8)
    for begin in halves:
        data[..., begin + 1] &= 0xBF  # below 2
    return data.reshape(rows, -1)


def save_tensor(path: Path, name: str, data: np.ndarray, kind: str) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", RANDOM_BLOCKS)
def test_what_gguf_dequantizes_is_what_is_served(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    data = random_blocks(kind, 6, 3)
    save_tensor(path, "token_embd.weight", data, kind)
    expected = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
    source = GGUFSource(path)
    assert source.shapes["model.embed_tokens.weight"] == tuple(expected.shape)
    assert torch.equal(source.read("model.embed_tokens.weight"), expected.bfloat16())
    weight = source.read_quantized("model.embed_tokens.weight")
    assert (weight is None) == (kind != "Q4_K")  # the only one in groups of 32 times 4 or 8 bits
    if weight is not None:
        assert weight.bits == 4
        assert torch.equal(weight.dequantize(), expected)
    info = GGUFFile(path).tensors["token_embd.weight"]
    assert gguf_formats({"blk.0.attn_q.weight": info}).layers == {
        "bfloat16" if weight is None else "int4": 6 * expected.shape[1]
    }


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    save_tensor(path, "t.weight", np.zeros((1, 54), np.uint8), "TQ1_0")
    with pytest.raises(ValueError, match=r"t\.weight has the type TQ1_0, which is not supported \(F32, .*Q6_K.* are\)"):
        dequantize(GGUFFile(path).tensors["t.weight"], torch.zeros(54, dtype=torch.uint8))


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
