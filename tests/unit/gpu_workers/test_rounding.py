"""Float weights rounded to integers: bounds that follow from the definition, and no worse than the gguf package."""

from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from config.shards import Span
from gpu_workers.weights.loader import open_source
from gpu_workers.weights.rounding import can_round, rounded
from gpu_workers.weights.source import Weights
from ipc.control import StartError
from tests.unit.gpu_workers.tiny import load_tiny, save_tiny, whole_logits
from tools.score.model import load

TOKENS = list(range(0, 130, 3))


def matrix(rows: int, inputs: int, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp(torch.randn(rows, 1, generator=generator) * spread)
    return torch.randn(rows, inputs, generator=generator) * scales * 0.05


@given(rows=st.integers(1, 9), groups=st.integers(1, 5), spread=st.floats(0, 3), seed=st.integers(0, 99))
def test_eight_bits_are_off_by_half_a_step_at_most(rows: int, groups: int, spread: float, seed: int) -> None:
    weight = matrix(rows, 32 * groups, spread, seed)
    result = rounded(weight, 8)
    assert result.codes.dtype == torch.int8
    assert result.minimums is None
    largest = weight.view(rows, groups, 32).abs().amax(dim=-1)
    # Half a step, and as much again for a scale that is rounded to float16.
    steps = largest / 127 * (0.5 + 127 / 2048) + 127 * 2**-25
    assert ((result.dequantize() - weight).view(rows, groups, 32).abs().amax(dim=-1) <= steps).all()


@given(rows=st.integers(1, 9), groups=st.integers(1, 5), spread=st.floats(0, 3), seed=st.integers(0, 99))
def test_four_bits_are_no_worse_than_dividing_the_range_into_fifteen(
    rows: int, groups: int, spread: float, seed: int
) -> None:
    weight = matrix(rows, 32 * groups, spread, seed)
    result = rounded(weight, 4)
    assert result.codes.dtype == torch.uint8
    assert int(result.codes.max()) <= 15
    plain = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
    expected = torch.from_numpy(gguf.quants.dequantize(plain, gguf.GGMLQuantizationType.Q4_1))
    ours, theirs = ((values - weight).square().sum() for values in (result.dequantize(), expected))
    assert ours <= theirs * 1.01 + 1e-12


def test_the_search_takes_a_tenth_off_the_error_of_normal_weights() -> None:
    weight = matrix(64, 512, spread=0)
    plain = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
    expected = torch.from_numpy(gguf.quants.dequantize(plain, gguf.GGMLQuantizationType.Q4_1))
    ours, theirs = ((values - weight).square().mean() for values in (rounded(weight, 4).dequantize(), expected))
    assert ours < 0.9 * theirs


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_minimums_are_float16_numbers(bits: int) -> None:
    result = rounded(matrix(5, 96), bits)
    for numbers in (result.scales, result.minimums):
        assert numbers is None or torch.equal(numbers.half().float(), numbers)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.25, -3.5])
def test_constant_groups_are_exact(bits: int, value: float) -> None:
    weight = torch.full((2, 64), value)
    torch.testing.assert_close(rounded(weight, bits).dequantize(), weight, rtol=2**-10, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_rounded_by_themselves(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(10, 64).bfloat16()
    whole = rounded(weight, bits)
    monkeypatch.setattr("gpu_workers.weights.rounding._CHUNK", 192)
    assert torch.equal(rounded(weight, bits).codes, whole.codes)
    assert torch.equal(rounded(weight[3:4], bits).scales, whole.scales[3:4])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_threads_make_the_same_integers(bits: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_workers.weights.rounding._CHUNK", 192)
    weight = matrix(rows, 64)
    alone, together = (rounded(weight, bits, threads) for threads in (1, 3))
    assert alone.shape == (rows, 64)
    assert torch.equal(alone.codes, together.codes)
    assert torch.equal(alone.dequantize(), together.dequantize())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_an_error(value: float) -> None:
    weight = torch.ones(2, 32)
    weight[1, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        rounded(weight, 8)


def test_only_matrices_of_whole_groups_are_rounded() -> None:
    assert can_round((3, 64))
    assert not can_round((3, 48))
    assert not can_round((64,))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_is_loaded_with_rounded_weights(quantization: str, tmp_path: Path) -> None:
    """Its logits are those of the checkpoint in which each matrix has been rounded before."""
    save_tiny(tmp_path / "whole", hidden_size=96, intermediate_size=128)
    exact = whole_logits(load_tiny(tmp_path / "whole"), TOKENS).clone()
    model = load(tmp_path / "whole", "float32", 1, "native", quantization)
    found = whole_logits(model, TOKENS).clone()
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    for name, tensor in tensors.items():
        if can_round(tuple(tensor.shape)):
            is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
            tensors[name] = rounded(tensor, 8 if is_table or quantization == "int8" else 4).dequantize()
    (tmp_path / "rounded").mkdir()
    save_file(tensors, tmp_path / "rounded" / "model.safetensors", {"format": "pt"})
    (tmp_path / "rounded" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    expected = whole_logits(load_tiny(tmp_path / "rounded"), TOKENS)
    error = (found - expected).norm() / expected.norm()
    assert error < (0.001 if quantization == "int8" else 0.05)  # beside int4 weights activations are rounded, too
    assert (found - exact).norm() > (found - expected).norm()


def test_a_checkpoint_with_nan_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path, hidden_size=96, intermediate_size=128)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(StartError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight: .* not finite"):
        load(tmp_path, "float32", 1, "native", "int8")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rank_rounds_its_part_as_it_would_the_whole(bits: int, tmp_path: Path) -> None:
    weight = matrix(6, 128)
    save_file({"w.weight": weight}, tmp_path / "model.safetensors")
    weights = Weights(open_source(tmp_path), lambda fraction: None, bits)
    whole = rounded(weight, bits).dequantize()
    for axis, span in ((0, Span(1, 3)), (1, Span(32, 64)), (1, Span(96, 32))):
        taken = weights.take_quantized({"w.weight": span}, axis)
        assert taken is not None
        assert torch.equal(taken[0].dequantize(), whole.narrow(axis, span.start, span.count))
    assert weights.left_floats == []
    for span in (Span(16, 32), Span(32, 16)):
        assert weights.take_quantized({"w.weight": span}, 1) is None
    assert weights.left_floats == ["w.weight", "w.weight"]
    assert weights.take_quantized({"w.weight": Span(0, 6)}, 0, least_bits=None) is None


def test_plain_torch_operations_refuse_it(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(StartError, match="--quantization int8 needs compiled kernels"):
        load(tmp_path, "float32", 1, "torch", "int8")
