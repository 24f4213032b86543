"""A process that compiles cases, as `tools.compile_kernels.compiled` asks for; without TRITON_INTERPRET."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from kernels.gpu.launch import compiling
from kernels.gpu.tables import noting, trying
from tools.gpu_kernels.case import Case
from tools.gpu_kernels.registry import cases_by_label
from tools.gpu_kernels.workers import Answer, Request, serve

_MOST_CHARACTERS = 600  # of an error: its end, where compilers say what it is


def _answers(request: Request) -> Iterator[Answer]:
    """One for each of `units`: a case's label, and the number of the candidate that it is compiled with, or None."""
    cases = cases_by_label(tuple(request["modules"]))
    for label, candidate in request["units"]:
        case = cases[label]
        settings = None if candidate is None else case.candidates[candidate]
        yield _compile(case, request["architecture"], settings)


def _compile(case: Case, architecture: str, settings: Mapping[str, Any] | None) -> Answer:
    """What launching the case compiles and which settings it asks for, up to the error that it ends with, if any."""
    error = ""
    with ExitStack() as inside:
        compiled = inside.enter_context(compiling(architecture))
        asked = inside.enter_context(noting())
        if settings is not None:
            inside.enter_context(trying(settings, case.kernel))
        try:
            case.prepare(torch.device("meta"), 0).launch()
        except Exception as problem:  # whatever a compiler or a kernel's wrapper raises is the result
            error = f"{type(problem).__name__}: {' '.join(str(problem).split()) or 'no message'}"
    found = [asdict(each) | {"constants": _plain(each.constants)} for each in compiled]
    return {"asked": asked, "compiled": found, "error": error[-_MOST_CHARACTERS:]}


def _plain(constants: Mapping[str, Any]) -> dict[str, Any]:
    """With names in the place of types and functions."""
    return {
        name: value if isinstance(value, int | float | str) else getattr(value, "__name__", str(value))
        for name, value in constants.items()
    }


if __name__ == "__main__":
    serve(_answers)
