"""A kernel's result against its oracle: what counts as an error, and that what was not written is seen."""

import math

import pytest
import torch

from tools.gpu_kernels.case import Prepared
from tools.gpu_kernels.checking import launch_poisoned, relative_error, worst_error


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (tensor(1, 2, 4), tensor(1, 2, 4), 0),
        (tensor(1, 3, 4), tensor(1, 2, 4), 0.25),
        (tensor(-1, 2), tensor(1, 2), 1),
        (tensor(0.001, 0), tensor(0.001, 0), 0),
        (tensor(math.inf, 1), tensor(math.inf, 1), 0),
        (tensor(-math.inf, 2), tensor(-math.inf, 1), 1),
        (tensor(math.nan, 1), tensor(math.nan, 1), 0),
        (tensor(math.nan, 1), tensor(1, 1), math.inf),
        (tensor(1, 1), tensor(math.nan, 1), math.inf),
        (tensor(math.inf, 1), tensor(5, 1), math.inf),
        (tensor(0), tensor(0), 0),
        (tensor(), tensor(), 0),
        (torch.tensor([7, 2**40]), torch.tensor([7, 2**40]), 0),
    ],
)
def test_relative_error(actual: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    assert relative_error(actual, expected) == pytest.approx(error)


def test_anything_where_nothing_is_expected_is_a_large_error() -> None:
    assert relative_error(tensor(1e-3, 0), tensor(0, 0)) > 1e20


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2\], expected is \[3\]"):
        relative_error(tensor(1, 2), tensor(1, 2, 3))


def test_the_worst_of_several_tensors_counts() -> None:
    assert worst_error((tensor(1), tensor(3)), (tensor(1), tensor(2))) == 0.5
    with pytest.raises(ValueError):
        worst_error((tensor(1),), (tensor(1), tensor(2)))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64], ids=str
)
def test_memory_that_a_launch_allocates_is_poisoned(dtype: torch.dtype) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    result = launch_poisoned(Prepared(lambda: torch.empty(100, dtype=dtype)))
    if dtype.is_floating_point:
        assert result.float().isnan().all()
    else:
        assert (result == torch.iinfo(dtype).max).all()
    assert torch.are_deterministic_algorithms_enabled() == before
