"""How a checkpoint says that embeddings are made of hidden states: sentence-transformers' modules, or a key of GGUF."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.json_fields import Fields, optional_json

# llama.cpp's enum of the key `{architecture}.pooling_type`; 0 says nothing.
_GGUF_NAMES = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
# The flags of sentence-transformers' Pooling. `mean_sqrt_len` is the mean at another length, which is divided out.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_NAMES = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean"}
# What else a chain of modules may have without changing a vector's direction.
_NEUTRAL = ("Transformer", "Normalize")


def pooling_of_directory(path: Path) -> str:
    """The name of what the model in a directory declares, whether we know it or not; empty: nothing.

    ValueError when a file does not have the form it should.
    """
    modules = path / "modules.json"
    names: list[str] = []
    if modules.exists():
        for kind, folder in _modules(modules):
            if kind == "Pooling":
                names.append(_pooling(path / folder / "config.json"))
            elif kind not in _NEUTRAL:
                names.append(kind)
    elif (path / "1_Pooling" / "config.json").exists():
        names.append(_pooling(path / "1_Pooling" / "config.json"))
    return ", then ".join(filter(None, names))


def _modules(path: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order."""
    try:
        entries = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path}: not a list of modules")
    found = []
    for entry in entries:
        kind, folder = (entry.get("type"), entry.get("path", "")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise ValueError(f"{path}: a module without a type and a path, which are strings")
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ValueError(f"{path}: the path {folder!r} of a module is not inside this directory")
        found.append((kind.rpartition(".")[2], folder))
    return found


def _pooling(path: Path) -> str:
    values = optional_json(path)
    mode = values.get("pooling_mode")
    if mode is not None:
        modes = [name for name in (mode if isinstance(mode, list) else [mode]) if isinstance(name, str)]
        if not modes or (isinstance(mode, list) and len(modes) < len(mode)):
            raise ValueError(f"{path}: pooling_mode is {mode!r}, not a name or a list of names")
        return "+".join(_NAMES.get(name, name) for name in modes)
    fields = Fields(str(path), values)
    return "+".join(name for flag, name in _FLAGS.items() if fields.flag(flag))


def pooling_of_gguf(metadata: Mapping[str, Any], architecture: str) -> str:
    """Likewise, of a GGUF file's metadata."""
    kind = metadata.get(f"{architecture}.pooling_type", 0)
    return "" if kind == 0 else _GGUF_NAMES.get(kind, f"type {kind!r}")
