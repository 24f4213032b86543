"""The files of a safetensors checkpoint and what their headers say.

Format: github.com/huggingface/safetensors (README, "Format"). Headers are untrusted.
"""

import json
import struct
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from config.json_fields import read_json

_MAX_HEADER = 100 << 20  # bytes, the format's own limit


class TensorHeader(Struct, frozen=True, array_like=True):
    """What a header says of one tensor."""

    dtype: str  # F32, F16, BF16, I32, ...
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    num_bytes: Annotated[int, Meta(ge=0)]


def safetensors_files(path: Path) -> list[Path]:
    """The checkpoint's files: those of model.safetensors.index.json, or the single one there is."""
    index_path = path / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index_path}: weight_map is not an object of file names")
        names = sorted(set(weight_map.values()))
        for name in names:
            if name != Path(name).name or not name.endswith(".safetensors"):
                raise ValueError(f"{index_path}: {name!r} is not the name of a safetensors file beside it")
            if not (path / name).exists():
                raise ValueError(f"{index_path}: {name} is missing: the download is incomplete")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        found = "no" if not files else f"{len(files)}"
        raise ValueError(f"{path}: there are {found} .safetensors files and no model.safetensors.index.json")
    return files


def has_safetensors(path: Path) -> bool:
    """Whether any of the checkpoint's files is in the directory."""
    return any(path.glob("*.safetensors"))


def safetensors_headers(path: Path) -> dict[str, TensorHeader]:
    """Of every tensor in the directory, by name; ValueError names the file that is no sound safetensors file."""
    tensors: dict[str, TensorHeader] = {}
    for file_path in safetensors_files(path):
        for name, entry in _header(file_path).items():
            if name == "__metadata__":
                continue
            try:
                begin, end = entry["data_offsets"]
                tensors[name] = msgspec.convert((entry["dtype"], entry["shape"], end - begin), TensorHeader)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file_path}: the header entry of {name!r} is malformed") from error
    return tensors


def _header(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise ValueError(f"{path}: not a safetensors file (its header length is {length})")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not a safetensors file (its header is not JSON)") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: not a safetensors file (its header is not an object)")
    return header
