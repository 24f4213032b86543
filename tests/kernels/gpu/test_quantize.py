"""Rows quantized to 8 bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gpu.quantize import quantize_rows
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import poisoned
from tests.kernels.gpu.rows import QUANTIZED, apart, assert_quantized, bits, normal

IN_PIECES = {"BLOCK": 64, "num_warps": 1}


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1 << 30),
    tokens=st.integers(1, 4),
    width=st.integers(1, 300),
    source=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dtype=st.sampled_from(QUANTIZED),
    gap=st.sampled_from([0, 3]),
)
def test_rows_of_any_size(
    seed: int, tokens: int, width: int, source: torch.dtype, dtype: torch.dtype, gap: int
) -> None:
    x = apart(normal(seed, tokens, width, dtype=source) * normal(seed + 1, tokens, 1, dtype=source).exp(), gap)
    wide = torch.zeros(tokens, width + gap, dtype=torch.int8, device=x.device).view(dtype)
    codes, scales = wide[:, :width], poisoned(tokens, dtype=torch.float32)
    quantize_rows(x, dtype, codes=codes, scales=scales)
    assert_quantized(codes, scales, x.double())
    assert not bits(wide[:, width:]).any()
    with trying(IN_PIECES):
        again, scales_again = quantize_rows(x, dtype)
    assert torch.equal(bits(again), bits(codes))
    assert torch.equal(scales_again, scales)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of divisions by zero
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_rows_that_are_no_usual_numbers(dtype: torch.dtype, pieces: bool) -> None:
    x = normal(5, 6, 100)
    x[0] = 0
    x[1, 77] = torch.nan
    x[2, 3] = -torch.inf
    x[3] *= 1e-41
    x[4] *= 1e38 / x[4].abs().max()
    x[5, 99] = -torch.tensor(torch.nan)
    if pieces:
        with trying(IN_PIECES):
            codes, scales = quantize_rows(x, dtype)
    else:
        codes, scales = quantize_rows(x, dtype)
    assert scales[0] == 0
    assert not codes[0].double().any()
    assert scales[1].isnan()
    assert scales[2] == torch.inf
    assert 0 <= scales[3] < 1e-38
    assert not codes[3].double().any()
    assert_quantized(codes[4:5], scales[4:5], x[4:5].double())
    assert scales[5].isnan()
