"""What the loader gives to a backend is what the memory plan counts, matrix by matrix."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config.arch import read_arch
from config.memory_plan import weight_bytes
from config.schema import Config, ModelConfig, WorkerConfig
from gpu_workers.backend import LoadedWeight
from gpu_workers.backends.native_cpu import NativeCpuBackend
from gpu_workers.comm import LocalComm
from gpu_workers.models.llama import LlamaModel
from gpu_workers.weights.loader import bits_of, load_model, open_source
from gpu_workers.weights.quantized import QuantizedWeight
from gpu_workers.weights.source import Weights
from kernels.cpu.build import BuildError
from kernels.cpu.library import PackedWeight
from tests.unit.gpu_workers.tiny import save_tiny
from tests.unit.gpu_workers.tiny_gguf import save_gguf

WHOLE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
UNLIKE = {"q_proj": "Q4_1", "k_proj": "Q4_1", "v_proj": "Q5_0", "gate_proj": "Q4_1", "up_proj": "Q8_0"}


class Rank(LocalComm):
    """One of several, which exchanges nothing: enough to load its part."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Recording(NativeCpuBackend):
    """Remembers what it is given, before it fills up anything."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16, 1, quantized=True, kv_dtype="bfloat16", progress=lambda *stage: None)
        self.given: list[LoadedWeight] = []

    def load_linear(self, weight: LoadedWeight, bias: torch.Tensor | None, partial: bool = False) -> PackedWeight:
        self.given.append(weight)
        return super().load_linear(weight, bias, partial)

    def load_gated_linear(self, weight: LoadedWeight, bias: torch.Tensor | None) -> PackedWeight:
        self.given.append(weight)
        return super().load_gated_linear(weight, bias)

    def load_vocabulary(self, table: LoadedWeight, head: LoadedWeight | None) -> tuple[PackedWeight, PackedWeight]:
        self.given += [table] if head is None else [table, head]
        return super().load_vocabulary(table, head)


def native() -> Recording:
    try:
        return Recording()
    except BuildError as error:
        pytest.skip(str(error))


def loaded(path: Path, quantization: str, rank: int = 0, size: int = 1) -> list[LoadedWeight]:
    """All matrices as the backend gets them."""
    backend = native()
    weights = Weights(open_source(path), lambda fraction: None, bits_of(quantization, backend), threads=2)
    LlamaModel(read_arch(path), None, weights, backend, Rank(rank, size))
    return backend.given


def size_of(weight: LoadedWeight) -> int:
    """Bytes in memory: codes, and a float16 scale, with 4 bits also a minimum, of 32 of them; or bfloat16."""
    if isinstance(weight, QuantizedWeight):
        rows, inputs = weight.shape
        return rows * inputs // 32 * {4: 20, 8: 34}[weight.bits]
    return 2 * weight.numel()


def planned(path: Path, quantization: str, tp: int = 1) -> int:
    """Of all matrices."""
    arch = read_arch(path)
    total, _ = weight_bytes(arch, ModelConfig(quantization=quantization, dtype="bfloat16"), True, True, tp)
    return total - 4 * (2 * arch.num_layers + 1) * arch.hidden_size


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
@pytest.mark.parametrize(
    "kinds",
    [
        UNLIKE,
        UNLIKE | {"o_proj": "Q8_0", "down_proj": "Q4_0"},
        {"v_proj": "F16"},
        {"q_proj": "BF16", "up_proj": "Q5_1"},
    ],
    ids=str,
)
def test_merged_matrices_whose_parts_differ(quantization: str, kinds: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "mixed.gguf"
    save_gguf(save_tiny(tmp_path / "hf", **WHOLE), path, "Q4_1", kinds=kinds)
    matrices = loaded(path, quantization)
    assert sum(map(size_of, matrices)) == planned(path, quantization)
    floats = [weight for weight in matrices if not isinstance(weight, QuantizedWeight)]
    assert (floats == []) is (quantization != "auto")
    table = matrices[0]  # integers of their own are left as they are
    assert isinstance(table, QuantizedWeight)
    assert table.bits == 4


def test_parts_that_differ_become_the_bits_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "mixed.gguf"
    save_gguf(save_tiny(tmp_path / "hf", **WHOLE), path, "Q4_1", kinds=UNLIKE)
    _, _, qkv, output, gate_up, down, *_ = loaded(path, "int8")
    bits = [weight.bits for weight in (qkv, output, gate_up, down) if isinstance(weight, QuantizedWeight)]
    assert bits == [8, 4, 8, 4]
    source = open_source(path)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    expected = torch.cat([source.read(name).float() for name in names])
    assert isinstance(qkv, QuantizedWeight)
    steps = expected.view(len(expected), -1, 32).abs().amax(dim=-1) / 127
    errors = (qkv.dequantize() - expected).view(len(expected), -1, 32).abs().amax(dim=-1)
    assert (errors <= steps * 0.6).all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 48},  # nothing is whole groups but the MLP's own width
        {"hidden_size": 96, "intermediate_size": 112},  # the MLP's width is not
        {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24},  # attention's is not
    ],
    ids=str,
)
def test_matrices_with_parts_of_groups_are_floats_in_the_plan_too(
    quantization: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    save_tiny(tmp_path, **{"intermediate_size": 128, "num_attention_heads": 3, "num_key_value_heads": 1} | sizes)
    matrices = loaded(tmp_path, quantization)
    assert {isinstance(weight, QuantizedWeight) for weight in matrices} == {True, False}
    assert sum(map(size_of, matrices)) == pytest.approx(planned(tmp_path, quantization), abs=1)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_plan_is_that_of_the_rank_that_has_most(quantization: str, size: int, tmp_path: Path) -> None:
    """Heads of 24 inputs: what a rank has of o_proj, whose inputs are 96, is not whole groups."""
    sizes = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = tmp_path / "tiny.gguf"
    save_gguf(save_tiny(tmp_path / "hf", **sizes, vocab_size=132), path, "Q4_0" if quantization == "auto" else "F16")
    ranks = [sum(map(size_of, loaded(path, quantization, rank, size))) for rank in range(size)]
    assert max(ranks) == pytest.approx(planned(path, quantization, size), abs=1)


def test_matrices_that_are_left_floats_are_counted_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, intermediate_size=128)  # 48 inputs, but 128 of the 3 layers' down_proj
    model = ModelConfig(quantization="int4", dtype="bfloat16")
    config = Config(model=model, worker=WorkerConfig(threads=1))
    spec: Any = SimpleNamespace(model_path=str(tmp_path), arch=read_arch(tmp_path), config=config)
    with caplog.at_level(logging.WARNING):
        load_model(spec, native(), LocalComm(), lambda stage, fraction: None)
    [line] = caplog.messages
    # The embedding, the head, and in each layer q, k, v, o, gate and up.
    assert line.startswith("--quantization int4: 20 matrices are left as floats: ")
    assert line.endswith("not whole groups of 32")
