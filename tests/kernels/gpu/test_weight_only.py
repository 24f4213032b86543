"""Products with integer weights, against float64, over formats, shapes and ways to share the work.

Bounds: an output is rounded once to its dtype. Before that, on a GPU a weight that is scaled before the product is
rounded up to three times to the dtype of the activations (its scale, the product of that, the sum with a minimum).
Sums are float32; weights too under the interpreter, which cuts bfloat16 off instead of rounding it.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.quantization import Quantization
from gpu_workers.weights.gguf import GGUFSource
from gpu_workers.weights.packed import PackedLinear
from gpu_workers.weights.quantized import QuantizedWeight
from kernels import reference
from kernels.gpu import weight_only
from kernels.gpu.launch import INTERPRETED
from kernels.gpu.pack import PackedIntegers, largest_group, pack_integers
from kernels.gpu.tables import trying
from kernels.gpu.weight_only import dequantize, weight_only_matmul, workspace_floats
from tests.kernels.gpu.device import DEVICE, poisoned
from tests.unit.gpu_workers.tiny_packed import pack, quantize, values

DTYPES = [torch.float16, torch.bfloat16] + ([torch.float32] if INTERPRETED else [])
KINDS = ["symmetric", "zeros", "minimums", "codes"]
SEEDS = st.integers(0, 1 << 30)


def integers(seed: int, bits: int, n: int, k: int, group: int, kind: str) -> QuantizedWeight:
    """Random codes with the scales, and zero points or minimums, of `group` inputs; all exact in float16."""
    generator = torch.Generator().manual_seed(seed)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (n, k), generator=generator, dtype=dtype)
    groups = -(-k // group)
    scales = (torch.rand(n, groups, generator=generator) + 0.5).mul(0.02).half().float()
    minimums = None
    if bits == 4 and kind == "symmetric":
        minimums = -8 * scales
    elif bits == 4 and kind == "zeros":
        minimums = -torch.randint(0, 17, (n, groups), generator=generator) * scales
    elif bits == 4 and kind == "minimums":
        minimums = torch.randn(n, groups, generator=generator).mul(0.1).half().float()
    repeated = [
        t if t is None else t.repeat_interleave(group // 32, dim=1)[:, : k // 32].contiguous()
        for t in (scales, minimums)
    ]
    return QuantizedWeight(bits, codes, *repeated)


def packed(weight: QuantizedWeight, dtype: torch.dtype = torch.float16) -> PackedIntegers:
    group = largest_group(weight.scales, weight.minimums)
    return pack_integers(weight.codes, weight.scales, weight.minimums, group, dtype, DEVICE)


def assert_product(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, parts: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """`actual` is x times the transpose of the float64 `weight`; `parts`: |code * scale| + |minimum|."""
    x64 = x.double().cpu()
    expected = reference.linear(x64, weight, None if bias is None else bias.double().cpu())
    step = 2.0**-24 if INTERPRETED else torch.finfo(x.dtype).eps / 2
    sums = x64.abs() @ parts.T
    bound = (3 * step + x.shape[1] * 2.0**-24) * sums + 2.0**-22 * expected.abs()
    bound += rounding(actual.dtype) * (expected.abs() + bound) + torch.finfo(actual.dtype).smallest_normal
    error = (actual.double().cpu() - expected).abs()
    assert bool((error <= bound).all()), f"{x.dtype}: {(error / bound).max()} of the bound"


def rounding(dtype: torch.dtype) -> float:
    """The relative error of a number in `dtype`."""
    eps = torch.finfo(dtype).eps
    return eps if INTERPRETED and dtype == torch.bfloat16 else eps / 2


def float64_parts(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(value, |code * scale| + |minimum|)."""
    minimums = None if weight.minimums is None else weight.minimums.double()
    value = reference.dequantize(weight.codes.double(), weight.scales.double(), minimums)
    sizes = reference.dequantize(
        weight.codes.double().abs(), weight.scales.double().abs(), None if minimums is None else minimums.abs()
    )
    return value, sizes


def activations(seed: int, rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, k] inside NaN, which would show in what reads beside it."""
    buffer = poisoned(rows + 2, k + 32, dtype=dtype)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    buffer[:rows, :k] = x.to(DEVICE, dtype)
    return buffer[:rows, :k]


def tiles(block_n: int, block_m: int, slices: int, split_k: int) -> dict[str, int]:
    return {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "SLICES": slices,
        "SPLIT_K": split_k,
        "num_warps": 4,
        "num_stages": 2,
    }


TILES = st.builds(
    tiles,
    block_n=st.sampled_from([16, 32, 64]),
    block_m=st.sampled_from([8, 16, 64]),
    slices=st.sampled_from([1, 2, 4]),
    split_k=st.sampled_from([1, 1, 2, 3]),
)


@settings(max_examples=25)
@given(
    seed=SEEDS,
    bits=st.sampled_from([4, 4, 8]),
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 70),
    k=st.integers(1, 12).map(lambda blocks: 32 * blocks),
    group=st.sampled_from([32, 64, 128, 384]),
    rows=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    has_bias=st.booleans(),
    use=TILES,
)
def test_product_is_that_of_the_dequantized_weight(
    seed: int,
    bits: int,
    kind: str,
    n: int,
    k: int,
    group: int,
    rows: int,
    dtype: torch.dtype,
    wide: bool,
    has_bias: bool,
    use: dict[str, int],
) -> None:
    source = integers(seed, bits, n, k, min(group, k), kind)
    weight = packed(source, dtype)
    x = activations(seed, rows, k, dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype) if has_bias else None
    out_dtype = torch.float32 if wide else dtype
    out = poisoned(rows, n + 5, dtype=out_dtype)
    with trying(use):
        workspace = poisoned(workspace_floats(rows, weight), dtype=torch.float32)
        weight_only_matmul(x, weight, bias, out=out[:, :n], workspace=workspace)
    assert_product(out[:, :n], x, *float64_parts(source), bias)
    assert bool(out[:, n:].isnan().all())


@settings(max_examples=10)
@given(
    seed=SEEDS,
    bits=st.sampled_from([4, 8]),
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 70),
    k=st.integers(1, 8).map(lambda blocks: 32 * blocks),
    group=st.sampled_from([32, 64, 128, 256]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_dequantized_weights_are_rounded_once(
    seed: int, bits: int, kind: str, n: int, k: int, group: int, dtype: torch.dtype
) -> None:
    source = integers(seed, bits, n, k, min(group, k), kind)
    expected, sizes = float64_parts(source)
    actual = dequantize(packed(source), dtype, poisoned(n, k, dtype=dtype)).double().cpu()
    # The sum with a minimum is rounded to float32 on the way.
    bound = rounding(dtype) * expected.abs() + 2.0**-22 * sizes
    assert bool(((actual - expected).abs() <= bound).all())


def test_shipped_settings_give_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slices, splits and wide tiles as they are used: a few rows, and more than are split over programs."""
    monkeypatch.setattr(weight_only, "_MOST_SPLIT_ROWS", 32)
    source = integers(1, 4, 100, 1024, 128, "zeros")
    for rows in (1, 16, 17, 64):
        x = activations(rows, rows, 1024, torch.bfloat16)
        assert_product(weight_only_matmul(x, packed(source)), x, *float64_parts(source))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_rows_do_not_depend_on_the_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on its size, nor on whether splits are summed in the program."""
    monkeypatch.setattr(weight_only, "_MOST_SPLIT_ROWS", 8)
    source = integers(2, 4, 40, 640, 64, "minimums")
    weight = packed(source, dtype)
    x = activations(3, 70, 640, dtype)
    whole = weight_only_matmul(x, weight, deterministic=True)
    assert_product(whole, x, *float64_parts(source))
    assert workspace_floats(8, weight, deterministic=True) > 0
    for first, count in ((0, 1), (5, 8), (69, 1), (20, 30)):
        assert torch.equal(
            weight_only_matmul(x[first : first + count], weight, deterministic=True), whole[first:][:count]
        )


def random_matrix(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(7)) * 0.1


def checkpoint_linear(
    method: str, bits: int, group_size: int | None, symmetric: bool
) -> tuple[PackedLinear, torch.Tensor]:
    """A linear as GPTQ and AWQ write it, and the [N, K] float32 values it stands for."""
    n, k = 48, 256
    groups = [index // (group_size or k) for index in range(k)]
    codes, zeros, scales = quantize(random_matrix(n, k), bits, groups, symmetric)
    stored_less = int(method == "gptq")
    tensors = pack(method, codes, zeros, scales, None, bits, stored_less)
    quantization = Quantization(
        method=method, bits=bits, group_size=group_size, symmetric=symmetric, zero_offset=stored_less
    )
    linear = PackedLinear(quantization, tensors["qweight"], tensors["qzeros"], tensors["scales"], None)
    return linear, values(codes, zeros, scales, groups)


@pytest.mark.parametrize(
    ("method", "bits", "group_size", "symmetric", "offsets"),
    [
        ("gptq", 4, 128, True, ""),
        ("gptq", 4, 32, False, "zeros"),
        ("gptq", 8, 64, True, ""),
        ("gptq", 4, None, False, "zeros"),
        ("awq", 4, 128, False, "zeros"),
        ("awq", 4, 64, False, "zeros"),
    ],
)
def test_gptq_and_awq_layouts(method: str, bits: int, group_size: int | None, symmetric: bool, offsets: str) -> None:
    linear, expected = checkpoint_linear(method, bits, group_size, symmetric)
    source = linear.integers()
    assert source is not None
    weight = packed(source)
    assert (weight.group, weight.offsets) == (group_size or 256, offsets)
    assert torch.equal(dequantize(weight, torch.float32).cpu(), expected)
    x = activations(1, 5, 256, torch.float16)
    assert_product(weight_only_matmul(x, weight), x, expected.double(), float64_parts(source)[1])


@pytest.mark.parametrize(
    ("kind", "offsets", "bits_a_weight"), [("Q4_0", "", 4.5), ("Q4_1", "minimums", 5.0), ("Q8_0", "", 8.5)]
)
def test_gguf_layouts(kind: str, offsets: str, bits_a_weight: float, tmp_path: Path) -> None:
    """Also what they take: as much as in the file."""
    n, k = 48, 256
    block_type = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(random_matrix(n, k).numpy(), block_type)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(tmp_path / "one.gguf").read_quantized("model.layers.0.mlp.up_proj.weight")
    assert source is not None
    weight = packed(source)
    assert (weight.group, weight.offsets) == (32, offsets)
    assert weight.num_bytes * 8 == bits_a_weight * n * k
    expected = torch.from_numpy(gguf.quants.dequantize(data, block_type).astype(np.float64))
    torch.testing.assert_close(dequantize(weight, torch.float32).cpu().double(), expected, rtol=1e-6, atol=1e-8)
    x = activations(1, 5, k, torch.bfloat16)
    assert_product(weight_only_matmul(x, weight), x, expected, float64_parts(source)[1])


@settings(max_examples=20)
@given(seed=SEEDS, group=st.sampled_from([32, 64, 128, 416]), blocks=st.sampled_from([3, 4, 13]))
def test_largest_group_is_that_of_the_checkpoint(seed: int, group: int, blocks: int) -> None:
    inputs = 32 * blocks
    source = integers(seed, 4, 3, inputs, min(group, inputs), "minimums")
    assert largest_group(source.scales, source.minimums) == min(group, inputs)
    # One row with a minimum of its own is enough.
    assert source.minimums is not None
    source.minimums[1, 1] += 1
    assert largest_group(source.scales, source.minimums) == 32


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)])
def test_scales_that_float16_does_not_hold(dtype: torch.dtype, kept: torch.dtype) -> None:
    source = integers(4, 4, 16, 128, 128, "symmetric")
    source.scales.fill_(2.0**-30)
    source.minimums.fill_(-(2.0**-27))
    weight = packed(source, dtype)
    assert weight.group_dtype == kept
    torch.testing.assert_close(dequantize(weight, torch.float32).cpu(), source.dequantize(), rtol=0, atol=0)


def test_what_is_not_packed() -> None:
    source = integers(5, 4, 16, 256, 32, "zeros")
    with pytest.raises(ValueError, match="groups of 96"):
        pack_integers(source.codes, source.scales, source.minimums, 96, torch.float16, DEVICE)
    with pytest.raises(ValueError, match="8-bit codes with minimums"):
        pack_integers(source.codes.view(torch.int8), source.scales, source.minimums, 32, torch.float16, DEVICE)
