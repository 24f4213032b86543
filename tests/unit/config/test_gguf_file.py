"""The GGUF header reader against the gguf package, and on damaged files."""

import random
from pathlib import Path

import gguf
import numpy as np
import pytest

from config.gguf_file import TENSOR_TYPES, GGUFFile


def write_sample(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("flag", True)
    writer.add_int64("negative", -(1 << 40))
    writer.add_array("tokens", ["", "é", "a longer one"])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_array("types", [1, -2, 3])
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b.weight", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_sample(path)
    file = GGUFFile(path)
    expected = {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "llama.rope.freq_base": 10000.0,
        "flag": True,
        "negative": -(1 << 40),
        "tokens": ["", "é", "a longer one"],
        "scores": [0.5, -1.0],
        "types": [1, -2, 3],
    }
    assert dict(file.metadata) == expected
    assert file.tensors["a.weight"].shape == (3, 4)
    assert file.tensors["b.weight"].shape == (2, 32)
    info = file.tensors["a.weight"]
    assert path.read_bytes()[info.offset : info.offset + info.num_bytes] == np.arange(12, dtype=np.float32).tobytes()


def test_the_model_file_reads_as_with_the_gguf_package(model_path: Path) -> None:
    oracle, file = gguf.GGUFReader(model_path), GGUFFile(model_path)
    assert set(file.metadata) == {name for name in oracle.fields if not name.startswith("GGUF.")}
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.chat_template", "llama.block_count"):
        assert file.metadata[name] == oracle.fields[name].contents()
    for tensor in oracle.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type, info.offset, info.num_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
    assert len(file.tensors) == len(oracle.tensors)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for kind, (name, elements, num_bytes) in TENSOR_TYPES.items():
        oracle = gguf.GGMLQuantizationType(kind)
        assert (name, elements, num_bytes) == (oracle.name, *gguf.GGML_QUANT_SIZES[oracle])


def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    path, cut = tmp_path / "x.gguf", tmp_path / "cut.gguf"
    write_sample(path)
    data = path.read_bytes()
    last = max(info.offset + info.num_bytes for info in GGUFFile(path).tensors.values())
    for length in [*range(0, last, 7), last - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_damaged_bytes_give_an_error_or_a_header_within_the_file(tmp_path: Path) -> None:
    path, bad = tmp_path / "x.gguf", tmp_path / "bad.gguf"
    write_sample(path)
    data = path.read_bytes()
    rng = random.Random(0)
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            damaged[rng.randrange(len(data))] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        bad.write_bytes(damaged)
        message = ""
        try:
            file = GGUFFile(bad)
            dict(file.metadata)
        except ValueError as error:
            message = str(error)
        if message:
            assert "bad.gguf" in message
            assert "\n" not in message
        else:
            assert all(info.offset + info.num_bytes <= len(data) for info in file.tensors.values())
