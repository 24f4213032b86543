"""Activations against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_workers.backends.torch_cpu import TorchCpuBackend
from kernels import reference
from kernels.gpu.activation import bias_activation, gated_activation, gated_activation_quantized
from kernels.gpu.quantize import quantize_rows
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import DEVICE, poisoned
from tests.kernels.gpu.rows import INSIDE, QUANTIZED, ROUNDING, apart, bits, normal
from tools.gpu_kernels.checking import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, of exp

IN_PIECES = {"BLOCK": 64, "num_warps": 1}
DTYPES = st.sampled_from(list(ROUNDING))
KINDS = st.sampled_from(["silu", "gelu", "none"])
SEEDS = st.integers(0, 1 << 30)
WIDTHS = st.one_of(st.integers(1, 300), st.sampled_from([1024, 1030]))


@settings(max_examples=25)
@given(
    seed=SEEDS,
    tokens=st.integers(1, 4),
    width=WIDTHS,
    dtype=DTYPES,
    kind=KINDS,
    bias=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    gap=st.sampled_from([0, 7]),
)
def test_activation_with_and_without_a_bias(
    seed: int, tokens: int, width: int, dtype: torch.dtype, kind: str, bias: bool, scale: float, gap: int
) -> None:
    x = apart(normal(seed, tokens, width, dtype=dtype) * scale, gap)
    offset = normal(seed + 1, width, dtype=dtype) if bias else None
    before = (x.double() if offset is None else x.double() + offset.double()).to(dtype)
    out = apart(poisoned(tokens, width, dtype=dtype), gap)
    assert bias_activation(x, offset, kind, out=out) is out
    assert relative_error(out, reference.activation(before.double(), kind)) <= ROUNDING[dtype] + INSIDE
    assert torch.equal(bias_activation(x, offset, kind), out)


@settings(max_examples=25)
@given(
    seed=SEEDS,
    tokens=st.integers(1, 4),
    width=WIDTHS,
    dtype=DTYPES,
    kind=KINDS,
    bias=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    gap=st.sampled_from([0, 7]),
)
def test_gated_activation(
    seed: int, tokens: int, width: int, dtype: torch.dtype, kind: str, bias: bool, scale: float, gap: int
) -> None:
    gate_up = apart(normal(seed, tokens, 2 * width, dtype=dtype) * scale, gap)
    offset = normal(seed + 1, 2 * width, dtype=dtype) if bias else None
    before = (gate_up.double() if offset is None else gate_up.double() + offset.double()).to(dtype)
    expected = reference.gated_activation(before.double(), kind)
    out = apart(poisoned(tokens, width, dtype=dtype), gap)
    assert gated_activation(gate_up, kind, bias=offset, out=out) is out
    # The activation is rounded, and so is its product.
    assert relative_error(out, expected) <= 2 * ROUNDING[dtype] + INSIDE
    assert torch.equal(gated_activation(gate_up, kind, bias=offset), out)


@settings(max_examples=25)
@given(
    seed=SEEDS,
    tokens=st.integers(1, 3),
    width=st.integers(1, 300),
    model=DTYPES,
    dtype=st.sampled_from(QUANTIZED),
    kind=KINDS,
    bias=st.booleans(),
    pieces=st.booleans(),
)
def test_quantized_activations_are_the_activations_quantized(
    seed: int, tokens: int, width: int, model: torch.dtype, dtype: torch.dtype, kind: str, bias: bool, pieces: bool
) -> None:
    gate_up = apart(normal(seed, tokens, 2 * width, dtype=model), 5)
    offset = normal(seed + 1, 2 * width, dtype=model) if bias else None
    expected, expected_scales = quantize_rows(gated_activation(gate_up, kind, bias=offset), dtype)
    codes = torch.zeros(tokens, width, dtype=torch.int8, device=DEVICE).view(dtype)
    scales = poisoned(tokens, dtype=torch.float32)
    if pieces:
        with trying(IN_PIECES):
            gated_activation_quantized(gate_up, kind, dtype, bias=offset, codes=codes, scales=scales)
    else:
        gated_activation_quantized(gate_up, kind, dtype, bias=offset, codes=codes, scales=scales)
    assert torch.equal(bits(codes), bits(expected))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_rounding_is_that_of_the_cpu_backend(kind: str) -> None:
    gate_up = normal(3, 8, 400, dtype=torch.bfloat16)
    expected = TorchCpuBackend(torch.bfloat16, deterministic=True).gated_activation(gate_up.cpu(), kind)
    assert (gated_activation(gate_up, kind).cpu() == expected).float().mean() > 0.99


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    gate_up = normal(1, 5, 2 * 1536, dtype=torch.bfloat16)
    out = gated_activation(gate_up, "silu")
    codes, scales = gated_activation_quantized(gate_up, "silu", torch.float8_e4m3fn)
    for row in range(5):
        one = gate_up[row : row + 1]
        assert torch.equal(gated_activation(one, "silu")[0], out[row])
        alone = gated_activation_quantized(one, "silu", torch.float8_e4m3fn)
        assert torch.equal(bits(alone[0][0]), bits(codes[row]))
        assert torch.equal(alone[1][0], scales[row])


def test_a_bias_on_float32_sums_is_rounded_as_a_linear_would() -> None:
    """`out` says in which dtype the model is."""
    gate_up, bias = normal(1, 3, 80), normal(2, 80, dtype=torch.bfloat16)
    out = poisoned(3, 40, dtype=torch.bfloat16)
    gated_activation(gate_up, "silu", bias=bias, out=out)
    written = (gate_up + bias.float()).to(torch.bfloat16)
    assert torch.equal(out, gated_activation(written, "silu"))


def test_large_values() -> None:
    """No overflow: a large input is passed on, a large negative one gives 0."""
    x = torch.tensor([[1e30, -1e30, 100.0, -100.0, torch.nan, 0.0]], device=DEVICE)
    for kind in ("silu", "gelu"):
        out = bias_activation(x, None, kind)[0].tolist()
        assert out[0] == pytest.approx(1e30)
        assert out[2] == 100.0
        assert [abs(out[1]), abs(out[3]), out[5]] == pytest.approx([0.0, 0.0, 0.0], abs=1e-30)
        assert out[4] != out[4]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'relu' is not one of silu, gelu, none"):
        gated_activation(normal(1, 1, 4), "relu")
