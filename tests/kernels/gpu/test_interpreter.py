"""A kernel under the interpreter converts as on a device: every turning point of bfloat16."""

import torch
import triton
import triton.language as tl

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
