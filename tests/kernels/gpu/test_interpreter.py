"""A kernel under the interpreter converts as on a device, every turning point of bfloat16, and divides as quietly."""

import warnings

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
