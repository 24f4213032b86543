"""8-bit numbers in kernels against torch's conversions, over every code and every place where rounding turns."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.numbers import decode_e4m3, decode_pair, encode_e4m3, encode_int8, native_e4m3, native_pairs
from tests.kernels.gpu.device import DEVICE, poisoned


@triton.jit
def _decode(codes, out, SIZE: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, decode_e4m3(tl.load(codes + at), NATIVE))


@triton.jit
def _decode_pairs(words, lows, highs, SIZE: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low, high = decode_pair(tl.load(words + at), INT8, NATIVE)
    tl.store(lows + at, low)
    tl.store(highs + at, high)


@triton.jit
def _encode(values, out, SIZE: tl.constexpr, NATIVE: tl.constexpr, INT8: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(values + at)
    tl.store(out + at, encode_int8(x) if INT8 else encode_e4m3(x, NATIVE))


def test_every_e4m3_code_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = poisoned(256, dtype=torch.float16)
    launch(_decode, (1,), codes, out, SIZE=256, NATIVE=native_e4m3())
    expected = codes.view(torch.float8_e4m3fn).float()
    numbers = ~expected.isnan()
    assert torch.equal(out.float()[numbers], expected[numbers])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_pair_of_codes_is_decoded_exactly(dtype: torch.dtype) -> None:
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).to(DEVICE)
    decoded = [poisoned(len(words), dtype=torch.float16) for _ in range(2)]
    constants = {"INT8": dtype == torch.int8, "NATIVE": native_pairs(dtype)}
    launch(_decode_pairs, (len(words) // 4096,), words, *decoded, SIZE=4096, **constants)
    expected = words.view(dtype).float().view(-1, 2)
    numbers = ~expected.isnan()
    assert torch.equal(torch.stack(decoded, 1).float()[numbers], expected[numbers])


def turning_points(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a dtype, the middles between neighbours, and the float32 values just beside those."""
    if dtype == torch.int8:
        numbers = torch.arange(-130, 131, dtype=torch.float32)
    else:
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        numbers = numbers[~numbers.isnan()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (-torch.inf, torch.inf)]
    more = torch.randn(2048, generator=torch.Generator().manual_seed(3)) * 100
    points = torch.cat([numbers, middles, *beside, more])
    return torch.nn.functional.pad(points, (0, -len(points) % 256)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_numbers_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    values = turning_points(dtype)
    codes = torch.int8 if dtype == torch.int8 else torch.uint8
    out = torch.zeros(len(values), dtype=codes, device=DEVICE)
    launch(_encode, (len(values) // 256,), values, out, SIZE=256, NATIVE=native_e4m3(), INT8=dtype == torch.int8)
    if dtype == torch.int8:
        assert torch.equal(out, values.clamp(-127, 127).round().to(torch.int8))
    else:
        assert torch.equal(out.view(dtype).float(), values.clamp(-448, 448).to(dtype).float())


def test_what_is_too_large_and_what_is_no_number() -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30] * 64, device=DEVICE)
    out = poisoned(256, dtype=torch.uint8)
    launch(_encode, (1,), values, out, SIZE=256, NATIVE=native_e4m3(), INT8=False)
    found = out.view(torch.float8_e4m3fn).float()
    assert found[:2].tolist() == [448.0, -448.0]
    assert found[2].isnan()
    assert found[3] == 448.0
