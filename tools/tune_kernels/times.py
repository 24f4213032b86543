"""Times of settings, kept in a file between measuring and choosing."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from kernels.gpu.launch import TARGETS
from kernels.gpu.tables import Entry, entries, entry_index
from tools.tune_kernels.measuring import Tried


@dataclass(frozen=True, slots=True)
class Times:
    """What was measured: by which GPU and versions, for which of the tables, and each case."""

    measured: str
    architecture: str
    cases: Sequence[Tried]


def write_times(file: Path, times: Times) -> None:
    file.write_text(json.dumps(asdict(times), indent=1) + "\n")


def read_times(file: Path, only: str) -> Times:
    """Those of cases whose label matches `only`. ValueError, which names the file, where it has none that can be used.

    The table of today must have all of their kernels, and choose by parameters that their shapes have.
    """
    try:
        times = msgspec.json.decode(file.read_bytes(), type=Times)
    except OSError as error:
        raise ValueError(f"--from {file}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--from {file}: not written by --times: {error}") from None
    if times.architecture not in TARGETS:
        raise ValueError(f"--from {file}: there is no table for its architecture {times.architecture!r}")
    tables = entries(times.architecture)
    cases = [each for each in times.cases if fnmatchcase(each.label, only)]
    if not cases:
        raise ValueError(f"--from {file}: none of its {len(times.cases)} cases matches --only {only}")
    shapes: dict[str, dict[str, type]] = {}
    for each in cases:
        problem = _problem(each, tables)
        kinds = {name: type(value) for name, value in each.shape.items()}
        if not problem and shapes.setdefault(each.kernel, kinds) != kinds:
            problem = f"its shape {dict(each.shape)} has other parameters than another case of the same kernel"
        if problem:
            raise ValueError(f"--from {file}: {each.label}: {problem}")
    return replace(times, cases=cases)


def _problem(tried: Tried, tables: Mapping[str, Sequence[Entry]]) -> str:
    """Why no settings can be chosen by it, or ""."""
    if tried.kernel not in tables:
        return f"the table has no kernel {tried.kernel!r}"
    try:
        index = entry_index(tables[tried.kernel], tried.shape)
    except (KeyError, TypeError):
        index = None
    if index is None:
        return f"the table has no settings for the shape {dict(tried.shape)}"
    for settings, seconds in tried.seconds.items():
        if not _are_settings(settings):
            return f"{settings!r} are no settings"
        if not 0 < seconds < math.inf:
            return f"{seconds} seconds with {settings}"
    return ""


def _are_settings(text: str) -> bool:
    try:
        settings: Any = json.loads(text)
    except ValueError:
        return False
    return isinstance(settings, dict) and all(isinstance(value, int | str) for value in settings.values())
