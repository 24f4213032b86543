"""Headers of safetensors files: read without the library, and refused by name where they are not sound."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from config.safetensors_files import TensorHeader, safetensors_headers


def write(path: Path, header: bytes, length: int | None = None) -> Path:
    data = struct.pack("<Q", len(header) if length is None else length) + header
    (path / "model.safetensors").write_bytes(data)
    return path


def test_headers_are_those_of_what_was_saved(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7, dtype=torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert safetensors_headers(tmp_path) == {
        "a.weight": TensorHeader("BF16", (3, 5), 30),
        "b": TensorHeader("I32", (7,), 28),
    }


GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        GOOD | {"dtype": 3},
        GOOD | {"shape": ["2"]},
        GOOD | {"shape": [-1]},
        GOOD | {"shape": "2"},
        GOOD | {"data_offsets": [0]},
        GOOD | {"data_offsets": [8, 0]},
        GOOD | {"data_offsets": ["0", "8"]},
        GOOD | {"data_offsets": [0, 8.5]},
    ],
    ids=str,
)
def test_a_malformed_entry_is_named(entry: Any, tmp_path: Path) -> None:
    write(tmp_path, json.dumps({"fine": GOOD, "odd": entry}).encode())
    with pytest.raises(ValueError, match=r"model\.safetensors: the header entry of 'odd' is malformed"):
        safetensors_headers(tmp_path)


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        (b"", 0, r"its header length is 0"),
        (b"{}", 3, r"its header length is 3"),
        (b"{}", 1 << 63, r"its header length is 9223372036854775808"),
        (b"{]", None, r"its header is not JSON"),
        (b"[" * 100_000, None, r"its header is not JSON"),
        (b"[]", None, r"its header is not an object"),
    ],
    ids=range(6),
)
def test_a_file_without_a_header_is_refused(header: bytes, length: int | None, message: str, tmp_path: Path) -> None:
    write(tmp_path, header, length)
    with pytest.raises(ValueError, match=rf"model\.safetensors: not a safetensors file \({message}\)"):
        safetensors_headers(tmp_path)
