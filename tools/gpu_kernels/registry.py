"""The cases of all families of GPU kernels: what the modules of this package that have `cases()` return."""

import pkgutil
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path

from tools.gpu_kernels.case import Case


def families() -> list[str]:
    """Names of the modules with cases; importing them imports triton."""
    names = [f"{__package__}.{found.name}" for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return [name for name in names if hasattr(import_module(name), "cases")]


def load_cases(modules: Sequence[str], only: str = "*") -> list[Case]:
    """The cases of `modules` whose label matches the glob `only`; ValueError when two have the same label."""
    cases: list[Case] = [case for name in modules for case in import_module(name).cases()]
    twice = [label for label, count in Counter(case.label for case in cases).items() if count > 1]
    if twice:
        raise ValueError(f"several cases are called {', '.join(twice)}")
    return [case for case in cases if fnmatchcase(case.label, only)]


@cache
def cases_by_label(modules: tuple[str, ...]) -> Mapping[str, Case]:
    """All cases of `modules`, for processes that are asked for one after the other."""
    return {case.label: case for case in load_cases(modules)}


def first_of_each_kernel(cases: Sequence[Case]) -> list[Case]:
    """A representative subset: one case a kernel."""
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(case.kernel, case)
    return list(first.values())
