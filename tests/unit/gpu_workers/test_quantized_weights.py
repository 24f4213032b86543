"""Weights kept as integers: their arithmetic against plain loops, and GGUF blocks against the gguf package."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from config.shards import Span
from gpu_workers.weights.gguf import GGUFSource
from gpu_workers.weights.loader import open_source
from gpu_workers.weights.quantized import QuantizedWeight, cat
from gpu_workers.weights.source import Weights
from ipc.control import StartError
from tests.unit.gpu_workers.tiny_gguf import pairs_from_halves

BLOCKS = ["Q4_0", "Q4_1", "Q8_0"]


def random_weight(rows: int, inputs: int, bits: int = 4, has_minimums: bool = True, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (rows, inputs), generator=generator, dtype=dtype)
    scales, minimums = torch.randn(2, rows, inputs // 32, generator=generator)
    return QuantizedWeight(bits, codes, scales, minimums if has_minimums else None)


def values(weight: QuantizedWeight) -> torch.Tensor:
    """By the definition, element by element."""
    rows, inputs = weight.codes.shape
    minimums = weight.minimums
    return torch.tensor(
        [
            [
                np.float32(weight.codes[n, k].item()) * np.float32(weight.scales[n, k // 32])
                + np.float32(0 if minimums is None else minimums[n, k // 32])
                for k in range(inputs)
            ]
            for n in range(rows)
        ]
    )


@pytest.mark.parametrize(("bits", "has_minimums"), [(4, True), (4, False), (8, False)])
def test_parts_of_a_weight_are_those_of_its_values(bits: int, has_minimums: bool) -> None:
    weight = random_weight(6, 96, bits, has_minimums)
    whole = values(weight)
    assert weight.shape == (6, 96)
    assert torch.equal(weight.dequantize(), whole)
    assert torch.equal(weight.narrow(0, 2, 3).dequantize(), whole[2:5])
    inner = weight.narrow(1, 32, 64)
    assert inner.shape == (6, 64)
    assert torch.equal(inner.dequantize(), whole[:, 32:])
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(weight.rows(order).dequantize(), whole[order])
    padded = weight.pad_rows(2)
    assert padded.shape == (8, 96)
    assert torch.equal(padded.dequantize(), torch.cat([whole, torch.zeros(2, 96)]))


@pytest.mark.parametrize(("start", "size"), [(16, 32), (0, 48), (32, 1)])
def test_a_slice_of_inputs_does_not_split_a_group(start: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"inputs {start} to {start + size} .* not a whole number of 32"):
        random_weight(2, 96).narrow(1, start, size)


def test_weights_with_and_without_minimums_are_joined() -> None:
    parts = [random_weight(2, 64, seed=1), random_weight(3, 64, has_minimums=False, seed=2)]
    whole = cat(parts)
    assert whole.shape == (5, 64)
    assert torch.equal(whole.dequantize(), torch.cat([values(part) for part in parts]))
    assert cat([parts[1], parts[1]]).minimums is None


@pytest.mark.parametrize("other", [random_weight(2, 64, 8, False), random_weight(2, 32)], ids=["bits", "inputs"])
def test_weights_of_different_kinds_are_not_joined(other: QuantizedWeight) -> None:
    with pytest.raises(ValueError, match="different bits and inputs"):
        cat([random_weight(2, 64), other])


# --- GGUF ------------------------------------------------------------------------------------------------------------


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]], architecture: str = "qwen2") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    if architecture == "llama":
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", BLOCKS)
def test_integers_of_gguf_blocks_are_exact(kind: str, tmp_path: Path) -> None:
    """Blocks of random bytes, so that every code occurs, also those that no quantizer writes."""
    bytes_of_block = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (50, 3, bytes_of_block), np.uint8)
    for begin in (0, 2) if kind == "Q4_1" else (0,):
        blocks[..., begin + 1] &= 0xBF  # below 2: scales without NaN and infinity
    source = GGUFSource(write(tmp_path / "x.gguf", {"token_embd.weight": (blocks.reshape(50, -1), kind)}))
    weight = source.read_quantized("model.embed_tokens.weight")
    assert weight is not None
    assert weight.bits == (8 if kind == "Q8_0" else 4)
    assert weight.codes.dtype == (torch.int8 if kind == "Q8_0" else torch.uint8)
    assert set(weight.codes.unique().tolist()) == set(range(-128, 128) if kind == "Q8_0" else range(16))
    assert weight.scales.dtype == torch.float32
    expected = gguf.quants.dequantize(blocks.reshape(50, -1), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(weight.dequantize().numpy(), expected)
    assert torch.equal(source.read("model.embed_tokens.weight"), torch.from_numpy(expected).bfloat16())


def test_rows_of_queries_and_keys_come_in_the_order_of_hugging_face(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType.Q4_1
    expected, tensors = {}, {}
    for short, name, heads in (("q", "q_proj", 4), ("k", "k_proj", 2), ("v", "v_proj", None)):
        matrix = torch.from_numpy(rng.normal(size=(32, 64)).astype(np.float32))
        stored = matrix if heads is None else pairs_from_halves(matrix, heads)
        tensors[f"blk.0.attn_{short}.weight"] = (gguf.quants.quantize(stored.numpy(), kind), "Q4_1")
        name = f"model.layers.0.self_attn.{name}.weight"
        expected[name] = gguf.quants.dequantize(gguf.quants.quantize(matrix.numpy(), kind), kind)
    source = GGUFSource(write(tmp_path / "x.gguf", tensors, "llama"))
    for name, values_ in expected.items():
        weight = source.read_quantized(name)
        assert weight is not None
        assert np.array_equal(weight.dequantize().numpy(), values_)


def test_floats_and_vectors_have_no_integers(tmp_path: Path) -> None:
    plain = np.ones((2, 32), np.float32)
    vector = gguf.quants.quantize(np.ones((1, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)[0]
    tensors = {"output.weight": (plain, "F32"), "output_norm.weight": (vector, "Q8_0")}
    source = GGUFSource(write(tmp_path / "x.gguf", tensors))
    assert source.read_quantized("lm_head.weight") is None
    assert source.read_quantized("model.norm.weight") is None
    assert torch.equal(source.read("model.norm.weight"), torch.ones(32, dtype=torch.bfloat16))


def test_taking_integers_counts_as_progress_and_their_absence_does_not(tmp_path: Path) -> None:
    block = gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    tensors = {"token_embd.weight": (block, "Q8_0"), "output.weight": (np.ones((2, 32), np.float32), "F32")}
    fractions: list[float] = []
    weights = Weights(open_source(write(tmp_path / "x.gguf", tensors)), fractions.append)
    assert weights.take_quantized({"lm_head.weight": Span(0, 2)}, 0) is None
    assert fractions == []
    assert weights.take_quantized({"model.embed_tokens.weight": Span(0, 2)}, 0) is not None
    assert weights.take("lm_head.weight").dtype == torch.float32
    assert fractions == [0.5, 1.0]


def test_an_unsupported_type_is_named_when_its_integers_are_asked_for(tmp_path: Path) -> None:
    tensors = {"output.weight": (np.zeros((1, 54), np.uint8), "TQ1_0")}
    weights = Weights(open_source(write(tmp_path / "x.gguf", tensors)), lambda fraction: None)
    assert weights.take_quantized({"lm_head.weight": Span(0, 1)}, 0) is None
    with pytest.raises(StartError, match="has the type TQ1_0, which is not supported"):
        weights.take("lm_head.weight")


def test_the_model_file_is_all_integers_but_for_its_norms(model_path: Path) -> None:
    source = GGUFSource(model_path)
    for name, shape in source.shapes.items():
        weight = source.read_quantized(name)
        assert (weight is not None) == (len(shape) == 2)
        if weight is not None:
            assert torch.equal(weight.dequantize().bfloat16(), source.read(name))
