"""Matrix products of 8-bit operands against float64, and their weights' quantization."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.gpu.launch import cdiv
from kernels.gpu.scaled_matmul import quantize_weight, scaled_matmul, workspace_bytes
from kernels.gpu.tables import choose, trying
from tests.kernels.gpu.device import DEVICE, poisoned
from tests.kernels.gpu.rows import QUANTIZED, apart, assert_quantized, assert_within

SEEDS = st.integers(0, 1 << 30)
SEVERAL_RUNS = 1100  # inputs


def codes(seed: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Of all magnitudes; between the rows there is NaN, or of int8 the largest number."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        values = torch.randint(-128, 128, (rows, columns), generator=generator).to(dtype)
    else:
        values = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448).to(dtype)
    return apart(values.to(DEVICE), 5)


def scales(seed: int, *shape: int) -> torch.Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.01).to(DEVICE)


class Operands:
    """Of one product."""

    def __init__(self, seed: int, m: int, n: int, k: int, dtype: torch.dtype, block_scaled: bool) -> None:
        self.x, self.weight = codes(seed, m, k, dtype), codes(seed + 1, n, k, dtype)
        columns = cdiv(k, 128)
        self.x_scales = scales(seed + 2, m, columns) if block_scaled else scales(seed + 2, m)
        self.weight_scales = scales(seed + 3, cdiv(n, 128), columns) if block_scaled else scales(seed + 3, n)
        self.bias = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * 100

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.x_scales, self.weight, self.weight_scales

    def of(self, rows: slice | torch.Tensor, deterministic: bool) -> torch.Tensor:
        return scaled_matmul(
            self.x[rows],
            self.x_scales[rows],
            self.weight,
            self.weight_scales,
            self.bias,
            out_dtype=torch.float32,
            deterministic=deterministic,
        )

    def assert_right(self, actual: torch.Tensor, biased: bool) -> None:
        """Against float64: K additions in float32, of which Hopper keeps fewer bits of e4m3 (`longest_run`) on a GPU,
        the products with scales, and the rounding of the result."""
        x, x_scales, weight, weight_scales = self.arguments
        bias = self.bias.double() if biased else None
        expected = reference.scaled_linear(x, x_scales.double(), weight, weight_scales.double(), bias)
        magnitude = reference.scaled_linear(
            x.double().abs(), x_scales.double(), weight.double().abs(), weight_scales.double(), self.bias.double().abs()
        )
        hopper = x.dtype == torch.float8_e4m3fn and DEVICE.type == "cuda"
        assert_within(actual, expected, ((x.shape[1] + 5) * 2**-23 + hopper * 2**-9) * magnitude)


@settings(max_examples=16)
@given(
    seed=SEEDS,
    m=st.integers(1, 80),
    n=st.integers(1, 150),
    k=st.integers(1, 300),
    dtype=st.sampled_from(QUANTIZED),
    block_scaled=st.booleans(),
    deterministic=st.booleans(),
    biased=st.booleans(),
    out_dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
@example(1, 3, 40, SEVERAL_RUNS, torch.float8_e4m3fn, False, False, True, torch.bfloat16)
@example(2, 3, 40, SEVERAL_RUNS, torch.float8_e4m3fn, False, True, True, torch.float32)
@example(3, 193, 40, SEVERAL_RUNS, torch.float8_e4m3fn, False, True, False, torch.float32)
@example(4, 257, 40, 600, torch.float8_e4m3fn, False, False, True, torch.float32)
@example(5, 3, 200, SEVERAL_RUNS, torch.float8_e4m3fn, True, True, True, torch.float32)
@example(6, 257, 150, 256, torch.float8_e4m3fn, True, False, True, torch.float32)
@example(7, 5, 150, SEVERAL_RUNS, torch.int8, False, False, True, torch.float32)
@example(8, 5, 150, 300, torch.int8, True, False, True, torch.float32)
def test_products_are_right(
    seed: int,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    block_scaled: bool,
    deterministic: bool,
    biased: bool,
    out_dtype: torch.dtype,
) -> None:
    operands = Operands(seed, m, n, k, dtype, block_scaled)
    if out_dtype == torch.float16:  # within its range
        operands.x_scales *= 1e-4
    bias = operands.bias if biased else None
    around = poisoned(m, n + 3, dtype=out_dtype)
    scaled_matmul(*operands.arguments, bias, deterministic=deterministic, out=around[:, :n])
    operands.assert_right(around[:, :n], biased)
    assert around[:, n:].isnan().all()
    again = scaled_matmul(*operands.arguments, bias, deterministic=deterministic, out_dtype=out_dtype)
    assert torch.equal(again, around[:, :n])


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("m", [1, 20])
def test_int8_is_added_up_exactly(m: int, split: int) -> None:
    """A single addition in float32 would lose the odd sums, which are beyond 2^24."""
    n, k = 33, 1300
    x, weight = codes(1, m, k, torch.int8), codes(2, n, k, torch.int8)
    x[:, 1::2], weight[:, 1::2] = 127, 127
    ones = torch.ones(max(m, n), device=DEVICE)
    exact = x.cpu().long() @ weight.cpu().long().t()
    assert (exact.abs() % 2 == 1).any()
    bias = -exact[0].double().to(DEVICE).float()
    assert (exact[0].abs() < 1 << 24).all()
    with trying({**choose("scaled_matmul", m=m, n=n, k=k, kind="int8"), "SPLIT_K": split}):
        assert (workspace_bytes(m, n, k, torch.int8) > 0) == (split > 1)
        out = scaled_matmul(x, ones[:m], weight, ones[:n], bias, out_dtype=torch.float32)
    assert torch.equal(out[0].cpu(), torch.zeros(n))
    assert torch.equal(out.cpu(), (exact - exact[0]).float())


@settings(max_examples=4)
@given(seed=SEEDS, m=st.integers(1, 300), kind=st.sampled_from(["float8", "blocks", "int8"]))
@example(seed=1, m=300, kind="float8")
@example(seed=2, m=193, kind="blocks")
@example(seed=3, m=300, kind="int8")
def test_a_row_has_the_same_bits_alone_and_anywhere_in_a_batch(seed: int, m: int, kind: str) -> None:
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    operands = Operands(seed, m, 40, 600, dtype, kind == "blocks")
    together = operands.of(slice(0, m), True)
    generator = torch.Generator().manual_seed(seed)
    for row in (m - 1, int(torch.randint(0, m, (1,), generator=generator))):
        assert torch.equal(operands.of(slice(row, row + 1), True)[0], together[row])
    others = torch.randperm(m, generator=generator)[: m // 3 + 1].to(DEVICE)
    assert torch.equal(operands.of(others, True), together[others])


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("kind", ["float8", "blocks", "int8"])
def test_other_tiles_are_right_too(kind: str, swap: bool) -> None:
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    operands = Operands(9, 40, 150, 300, dtype, kind == "blocks")
    blocks = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 3, "SWAP": swap}
    with trying({**blocks, "SPLIT_K": 2, "num_warps": 4, "num_stages": 2}):
        operands.assert_right(operands.of(slice(0, 40), False), True)


def test_a_workspace_of_the_size_that_is_asked_for_is_enough() -> None:
    operands = Operands(4, 3, 70, SEVERAL_RUNS, torch.float8_e4m3fn, False)
    size = workspace_bytes(3, 70, SEVERAL_RUNS, torch.float8_e4m3fn, deterministic=True)
    memory = poisoned(size // 4 + 5, dtype=torch.float32)
    out = scaled_matmul(*operands.arguments, deterministic=True, workspace=memory[: size // 4])
    assert torch.equal(out, scaled_matmul(*operands.arguments, deterministic=True))
    assert memory[size // 4 :].isnan().all()
    assert not memory[: size // 4].isnan().any()


@settings(max_examples=20)
@given(
    seed=SEEDS,
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    dtype=st.sampled_from(QUANTIZED),
    block_scaled=st.booleans(),
)
def test_weights_are_quantized_to_the_nearest(
    seed: int, n: int, k: int, dtype: torch.dtype, block_scaled: bool
) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)
    weight[n // 2] = 0
    found, found_scales = quantize_weight(weight, dtype, block_scaled)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert found_scales.shape == ((cdiv(n, 128), cdiv(k, 128)) if block_scaled else (n,))
    if block_scaled:
        wide = torch.zeros(2, cdiv(n, 128) * 128, cdiv(k, 128) * 128, dtype=torch.float64, device=DEVICE)
        wide[0, :n, :k], wide[1, :n, :k] = weight, found
        blocks = wide.view(2, found_scales.shape[0], 128, -1, 128).transpose(2, 3).flatten(3)
        assert_quantized(blocks[1].to(dtype), found_scales, blocks[0])
    else:
        assert_quantized(found, found_scales, weight.double())
    largest = 127 if dtype == torch.int8 else 448
    assert found.float().abs().max() == (largest if weight.any() else 0)
