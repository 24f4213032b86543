"""A kernel under the interpreter converts as on a device, every turning point of bfloat16, and divides as quietly."""

import warnings

import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu.interpreter import divide_as_devices
from kernels.gpu.launch import launch
from tests.kernels.gpu.device import DEVICE, poisoned


@triton.jit
def _round(values, stored, converted, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(values + at)
    tl.store(stored + at, x)
    tl.store(converted + at, x.to(tl.bfloat16).to(tl.float32))


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    """All positive numbers, the middles between neighbours, what is just beside those, and their negatives."""
    numbers = torch.arange(0x7F80, dtype=torch.int32) << 16
    beside = [numbers + offset for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    positive = torch.cat(beside).view(torch.float32)
    values = torch.cat([positive, -positive, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 4096)).to(DEVICE)
    stored = poisoned(len(values), dtype=torch.bfloat16)
    converted = poisoned(len(values), dtype=torch.float32)
    launch(_round, (len(values) // 4096,), values, stored, converted, SIZE=4096)
    expected = values.to(torch.bfloat16).float()
    for found in (stored.float(), converted):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(0), expected.nan_to_num(0))


@triton.jit
def _multiply(left, right, products, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(left + rows[:, None] * K + inner[None, :])
    b = tl.load(right + inner[:, None] * N + columns[None, :])
    product = tl.dot(a, b, out_dtype=tl.float32, input_precision="ieee")
    tl.store(products + rows[:, None] * N + columns[None, :], product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("height", [16, 64])
def test_a_row_of_a_product_has_the_same_bits_wherever_it_is(dtype: torch.dtype, height: int) -> None:
    generator = torch.Generator().manual_seed(height)
    row = torch.randn(64, generator=generator)
    left = row.expand(height, 64).to(dtype).contiguous().to(DEVICE)
    right = torch.randn(64, 32, generator=generator).to(dtype).to(DEVICE)
    products = poisoned(height, 32, dtype=torch.float32)
    launch(_multiply, (1,), left, right, products, M=height, N=32, K=64)
    expected = left.double() @ right.double()
    torch.testing.assert_close(products.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(products, products[:1].expand(height, 32))


@triton.jit
def _divide(values, divisors, quotients, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(quotients + at, tl.load(values + at) / tl.load(divisors + at))


def test_a_division_by_zero_warns_nobody() -> None:
    values, divisors = torch.tensor([[1, -1, 0, 3e38], [0, 0, 0, 1e-30]], device=DEVICE)
    quotients = poisoned(4, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as warned:  # the filters of pytest are not those of a server
        warnings.simplefilter("always")
        divide_as_devices()
        launch(_divide, (1,), values, divisors, quotients, SIZE=4)
    assert [str(each.message) for each in warned if each.category is RuntimeWarning] == []
    expected = [torch.inf, -torch.inf, torch.nan, torch.inf]
    assert torch.equal(quotients.cpu().nan_to_num(nan=7), torch.tensor(expected).nan_to_num(nan=7))
