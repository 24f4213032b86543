"""How kernels are compiled for a shape: block sizes, warps and stages, from tables that are shipped.

The same shape gets the same settings on every start and every rank, since nothing is measured then. A folder an
architecture, a file a family of kernels:

    {"measured": "NVIDIA H200, 2026-12-01, torch 2.13.0, triton 3.9.0" or "",
     "kernels": {"prefill_attention": [{"when": {"head_dim": 64}, "use": {"BLOCK_M": 128, "num_warps": 4}}, ...]}}

`when` names parameters of the shape: a value, or [lowest, highest]. The first entry that holds is taken; the last one
has no `when`. An empty `measured` says that the settings were chosen by counting registers and bytes, on no device.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from kernels.gpu.launch import architecture

FOLDER = Path(__file__).parent

Shape = Mapping[str, int | str]
Entry = Mapping[str, Any]  # "when", where it is not the last one, and "use"

_tried: ContextVar[tuple[Mapping[str, Any], str] | None] = ContextVar("tried", default=None)
_noted: ContextVar[list[tuple[str, Shape]] | None] = ContextVar("noted", default=None)


def choose(kernel: str, **shape: int | str) -> Mapping[str, Any]:
    """The settings of `kernel` for `shape` on the current architecture; KeyError when no table has the kernel."""
    noted = _noted.get()
    if noted is not None:
        noted.append((kernel, shape))
    tried = _tried.get()
    if tried is not None and tried[1] in ("", kernel):
        return tried[0]
    return _choose(architecture(), kernel, tuple(shape.items()))


@contextmanager
def trying(settings: Mapping[str, Any], kernel: str = "") -> Iterator[None]:
    """Inside, `settings` are taken for every shape of `kernel`, or of all kernels: for tuning."""
    token = _tried.set((settings, kernel))
    try:
        yield
    finally:
        _tried.reset(token)


@contextmanager
def noting() -> Iterator[list[tuple[str, Shape]]]:
    """The kernels and shapes that settings are chosen for inside, in that order."""
    noted: list[tuple[str, Shape]] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


@cache
def _choose(name: str, kernel: str, shape: tuple[tuple[str, int | str], ...]) -> Mapping[str, Any]:
    found = entries(name).get(kernel, [])
    values = dict(shape)
    index = entry_index(found, values)
    if index is None:
        raise KeyError(f"{name}: {kernel} has no settings for {values}")
    return found[index]["use"]


def entry_index(found: Sequence[Entry], shape: Shape) -> int | None:
    """Which of a kernel's entries is taken for `shape`."""
    for index, entry in enumerate(found):
        if all(_holds(shape[parameter], wanted) for parameter, wanted in entry.get("when", {}).items()):
            return index
    return None


def _holds(value: int | str, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return wanted[0] <= value <= wanted[1]
    return value == wanted


@cache
def entries(name: str) -> Mapping[str, list[dict[str, Any]]]:
    """All kernels' entries for the architecture `name`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((FOLDER / name).glob("*.json")):
        found.update(json.loads(file.read_text())["kernels"])
    return found
