"""Checked access to the values of a model's JSON configs, which are untrusted."""

import json
import sys
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ValueError when it is anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # bad syntax, bad UTF-8, or an integer of thousands of digits
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def optional_json(path: Path) -> dict[str, Any]:
    """Likewise, but empty where there is no such file."""
    return read_json(path) if path.exists() else {}


class Fields:
    """Checked access to the values of a config."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source = source
        self.values = values

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise ValueError(f"{self.source}: {key} is {value!r}, not an integer from {least} to 2^31 - 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{self.source}: {key} is {value!r}, not a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{self.source}: {key} is {value!r}, not true or false")
        return bool(value)
