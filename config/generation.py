"""What a model recommends for sampling: its `generation_config.json`, or the `general.sampling` keys of a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.gguf_file import GGUFFile
from config.json_fields import optional_json
from config.schema import GenerationDefaults

# Least and greatest value that a request may ask for as well.
_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 2.0),
    "max_new_tokens": (1, 1 << 31),
}
_INTEGERS = ("top_k", "max_new_tokens")
_GGUF_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}


def read_generation(path: Path) -> tuple[GenerationDefaults, list[str]]:
    """The recommendations of the model in the directory or .gguf file `path`, and lines on those that cannot be used.

    ValueError when the file is no JSON object.
    """
    if path.is_dir():
        return _defaults("generation_config.json", optional_json(path / "generation_config.json"))
    prefix = "general.sampling."
    metadata = GGUFFile(path).metadata
    values = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    return _defaults("the file", {_GGUF_NAMES.get(key, key): value for key, value in values.items()})


def _defaults(source: str, values: Mapping[str, Any]) -> tuple[GenerationDefaults, list[str]]:
    used: dict[str, Any] = {}
    refused = []
    for name, (least, greatest) in _BOUNDS.items():
        value = values.get(name)
        if value is None:
            continue
        kinds = int if name in _INTEGERS else int | float
        if isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= greatest:
            # GGUF has 32-bit floats: 0.7 is meant, not 0.699999988.
            used[name] = value if isinstance(value, int) else float(f"{value:.7g}")
        else:
            refused.append(f"{source}: {name} {value!r} is not used: it is not a number from {least:g} to {greatest:g}")
    return GenerationDefaults(**used), refused


def describe(defaults: GenerationDefaults) -> str:
    """One line for people: what requests get that do not say."""
    said = {name: getattr(defaults, name) for name in _BOUNDS}
    parts = [f"{name} {value:g}" for name, value in said.items() if value is not None]
    if not parts:
        return "sampling defaults: OpenAI's"
    return f"sampling defaults: {', '.join(parts)}, as the model recommends (--generation-config none: OpenAI's)"
