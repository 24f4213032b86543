"""RMSNorm in all its forms against float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.gpu.norm import add_rms_norm, add_rms_norm_quantized, rms_norm, rms_norm_quantized
from kernels.gpu.quantize import quantize_rows
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import poisoned
from tests.kernels.gpu.rows import INSIDE, QUANTIZED, ROUNDING, apart, bits, normal
from tools.gpu_kernels.checking import relative_error

IN_PIECES = {"BLOCK": 64, "num_warps": 1}
DTYPES = st.sampled_from(list(ROUNDING))
SEEDS = st.integers(0, 1 << 30)
EPS = 1e-5


def bound(dtype: torch.dtype) -> float:
    """The normed value is rounded, and so is its product with the weight."""
    return 2 * ROUNDING[dtype] + INSIDE


@settings(max_examples=25)
@given(
    seed=SEEDS,
    tokens=st.integers(1, 4),
    width=st.integers(1, 300),
    dtype=DTYPES,
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    gap=st.sampled_from([0, 5]),
    in_place=st.booleans(),
)
def test_norm(seed: int, tokens: int, width: int, dtype: torch.dtype, scale: float, gap: int, in_place: bool) -> None:
    x, weight = apart(normal(seed, tokens, width, dtype=dtype) * scale, gap), normal(seed + 1, width, dtype=dtype)
    expected = reference.rms_norm(x.double(), weight.double(), EPS)
    with trying(IN_PIECES):
        assert relative_error(rms_norm(x, weight, EPS), expected) <= bound(dtype)
    out = x if in_place else apart(poisoned(tokens, width, dtype=dtype), gap)
    assert rms_norm(x, weight, EPS, out=out) is out
    assert relative_error(out, expected) <= bound(dtype)


@settings(max_examples=25)
@given(
    seed=SEEDS,
    tokens=st.integers(1, 4),
    width=st.integers(1, 300),
    dtype=DTYPES,
    partial=st.booleans(),
    in_place=st.booleans(),
    pieces=st.booleans(),
)
def test_sum_with_the_residual_and_norm(
    seed: int, tokens: int, width: int, dtype: torch.dtype, partial: bool, in_place: bool, pieces: bool
) -> None:
    """`partial`: x is float32, as a sum over ranks is."""
    x = apart(normal(seed, tokens, width, dtype=torch.float32 if partial else dtype), 3)
    residual, weight = apart(normal(seed + 1, tokens, width, dtype=dtype), 8), normal(seed + 2, width, dtype=dtype)
    # Exact in float64, rounded to float32 and then to `dtype`, as in the kernel.
    expected_total = (x.double() + residual.double()).float().to(dtype)
    total = residual if in_place else poisoned(tokens, width, dtype=dtype)
    if pieces:
        with trying(IN_PIECES):
            normed, returned = add_rms_norm(x, residual, weight, EPS, total=total)
    else:
        normed, returned = add_rms_norm(x, residual, weight, EPS, total=total)
    assert returned is total
    assert torch.equal(total, expected_total)
    assert relative_error(normed, reference.rms_norm(total.double(), weight.double(), EPS)) <= bound(dtype)


@settings(max_examples=25)
@given(
    seed=SEEDS,
    tokens=st.integers(1, 3),
    width=st.one_of(st.integers(1, 300), st.sampled_from([576, 1536, 4096])),
    model=DTYPES,
    dtype=st.sampled_from(QUANTIZED),
    pieces=st.booleans(),
)
def test_quantized_norms_are_the_norms_quantized(
    seed: int, tokens: int, width: int, model: torch.dtype, dtype: torch.dtype, pieces: bool
) -> None:
    x, residual = normal(seed, tokens, width, dtype=model), normal(seed + 1, tokens, width, dtype=model)
    weight = normal(seed + 2, width, dtype=model)
    expected, total = add_rms_norm(x, residual, weight, EPS)
    outputs = (
        torch.zeros(tokens, width, dtype=torch.int8, device=x.device).view(dtype),
        poisoned(tokens, dtype=torch.float32),
    )

    def run() -> None:
        codes, scales, actual_total = add_rms_norm_quantized(
            x, residual, weight, EPS, dtype, codes=outputs[0], scales=outputs[1]
        )
        alone = rms_norm_quantized(total, weight, EPS, dtype)
        assert torch.equal(actual_total, total)
        assert torch.equal(bits(alone[0]), bits(codes))
        assert torch.equal(alone[1], scales)

    if pieces:
        with trying(IN_PIECES):
            expected = rms_norm(total, weight, EPS)  # added in another order
            run()
    else:
        run()
    codes, scales = quantize_rows(expected, dtype)
    assert torch.equal(bits(outputs[0]), bits(codes))
    assert torch.equal(outputs[1], scales)


def test_rounding_is_that_of_published_models() -> None:
    """Before the product with the weight, so most numbers are equal to the bit; without, a quarter would not be."""
    x, weight = normal(1, 8, 200, dtype=torch.bfloat16), normal(2, 200, dtype=torch.bfloat16)
    expected = F.rms_norm(x.float(), (200,), None, EPS).to(torch.bfloat16) * weight
    assert (rms_norm(x, weight, EPS) == expected).float().mean() > 0.99


@pytest.mark.parametrize("width", [20, 576, 1536, 4096])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(width: int) -> None:
    x, residual = normal(1, 5, width, dtype=torch.bfloat16), normal(2, 5, width, dtype=torch.bfloat16)
    weight = normal(3, width, dtype=torch.bfloat16)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    codes, scales = rms_norm_quantized(x, weight, EPS, torch.int8)
    assert torch.equal(rms_norm(total, weight, EPS), normed)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(add_rms_norm(x[one], residual[one], weight, EPS)[0], normed[one])
        alone = rms_norm_quantized(x[one], weight, EPS, torch.int8)
        assert torch.equal(alone[0], codes[one])
        assert torch.equal(alone[1], scales[one])


def test_rows_wider_than_a_block() -> None:
    """Those of the table, without `trying`."""
    x, weight = normal(1, 2, 40000), normal(2, 40000)
    assert relative_error(rms_norm(x, weight, EPS), reference.rms_norm(x.double(), weight.double(), EPS)) < 2e-6


def test_what_is_no_number_stays_in_its_row() -> None:
    x, weight = normal(1, 3, 50), normal(2, 50)
    x[1, 7] = torch.nan
    normed = rms_norm(x, weight, EPS)
    assert normed[1].isnan().all()
    assert not normed[[0, 2]].isnan().any()
    assert rms_norm_quantized(x, weight, EPS, torch.int8)[1].isnan().tolist() == [False, True, False]
