"""Whether a kernel wrote what it should have."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tools.gpu_kernels.case import Prepared

_SMALLEST = 1e-30  # the scale of an error where all expected values are 0


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error over the largest expected value; infinite where one is NaN and the other is not.

    Equal values, infinite ones too, have no error. Raises ValueError when the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"the kernel wrote {list(actual.shape)}, expected is {list(expected.shape)}")
    if not expected.numel():
        return 0.0
    found, wanted = actual.double(), expected.double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    error = torch.where(same, 0.0, (found - wanted).abs()).nan_to_num(torch.inf, torch.inf).max()
    finite = torch.where(wanted.isfinite(), wanted.abs(), 0.0)
    return float(error / finite.max().clamp(min=_SMALLEST))


def worst_error(actual: Any, expected: Any) -> float:
    """`relative_error` of a tensor, or the largest one of tuples of them."""
    if isinstance(expected, tuple):
        return max(relative_error(*pair) for pair in zip(actual, expected, strict=True))
    return relative_error(actual, expected)


def launch_poisoned(prepared: Prepared) -> Any:
    """What the kernel wrote, where memory that it allocates is NaN before, or the largest integer."""
    with _poisoned_memory():
        return prepared.launch()


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """torch fills what torch.empty returns where it is to be deterministic (torch.utils.deterministic)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
