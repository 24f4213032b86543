"""What the tests of kernels that treat tensors row by row share."""

import torch

from tests.kernels.gpu.device import DEVICE, poisoned

# The largest relative error of one rounding to the nearest, normal number.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Of float32 sums of a few hundred products, and of a device's approximate exp, rsqrt and division.
INSIDE = 2.0**-19
QUANTIZED = (torch.int8, torch.float8_e4m3fn)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """`x` [T, ...] as a view of rows with `gap` NaNs between them."""
    wide = poisoned(x.shape[0], x[0].numel() + gap, dtype=x.dtype)
    wide[:, : x[0].numel()] = x.flatten(1)
    return wide[:, : x[0].numel()].unflatten(1, x.shape[1:])


def bits(x: torch.Tensor) -> torch.Tensor:
    """For comparisons to the bit, in which NaNs are equal, too."""
    return x.contiguous().view(torch.uint8)


def assert_within(actual: torch.Tensor, expected: torch.Tensor, inside: torch.Tensor) -> None:
    """Errors of at most `inside`, all in float64, before the result is rounded to its dtype."""
    allowed = inside + ROUNDING[actual.dtype] * (expected.abs() + inside)
    assert torch.all((actual.double() - expected).abs() <= allowed)  # and so nothing is NaN


def assert_quantized(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    """Codes [..., K] and scales [...] are those of x, in float64.

    A scale is rounded once. A code is the nearest number, so it is off by half a step: of int8 that is half a scale, of
    e4m3 1/16 of the value (3 bits of mantissa) or 2^-10 scales (subnormal numbers). The multiplication with the inverse
    of the scale can turn what is in the middle between two codes.
    """
    largest = 127.0 if codes.dtype == torch.int8 else 448.0
    expected = x.abs().amax(-1) / largest
    assert torch.all((scales.double() - expected).abs() <= expected * 2.0**-22)
    wide = scales.double()[..., None]
    half_step = wide / 2 if codes.dtype == torch.int8 else torch.maximum(x.abs() / 16, wide * 2.0**-10)
    error = (codes.double() * wide - x).abs()
    assert torch.all(error <= half_step + x.abs() * 2.0**-20)  # and so nothing is NaN
