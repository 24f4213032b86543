"""Models of public shapes with random weights: what a step costs does not depend on their values."""

from collections.abc import Mapping

import torch

from config.schema import ModelArch, RopeConfig
from gpu_workers.backend import Backend
from gpu_workers.comm import LocalComm
from gpu_workers.models import model_class
from gpu_workers.models.llama import LlamaModel, expected_tensors
from gpu_workers.weights.quantized import QuantizedWeight
from gpu_workers.weights.source import Weights

_SPREAD = 0.02  # standard deviation, as models are initialised

# From the models' published config.json.
SHAPES = {
    "llama-3.1-8b": ModelArch(
        family="llama",
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        max_position=131072,
        rope=RopeConfig(
            theta=500000.0,
            type="llama3",
            factor=8.0,
            original_max_position=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        name="Llama-3.1-8B",
    ),
    "qwen2.5-1.5b": ModelArch(
        family="llama",
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=8960,
        vocab_size=151936,
        max_position=32768,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1000000.0),
        tie_embeddings=True,
        qkv_bias=True,
        name="Qwen2.5-1.5B",
    ),
    "smollm2-135m": ModelArch(
        family="llama",
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        max_position=8192,
        rope=RopeConfig(theta=100000.0),
        tie_embeddings=True,
        name="SmolLM2-135M",
    ),
}


class RandomSource:
    """Normal numbers for every tensor of `arch`, made on `device`; those of norms are around 1."""

    label = "random weights"

    def __init__(self, arch: ModelArch, device: torch.device) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = expected_tensors(arch)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def read(self, name: str) -> torch.Tensor:
        values = torch.empty(self.shapes[name], dtype=torch.bfloat16, device=self._device)
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return values.normal_(mean, _SPREAD, generator=self._generator)

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        return None


def random_model(arch: ModelArch, backend: Backend, max_length: int) -> LlamaModel:
    """On one rank, for sequences of up to `max_length` tokens."""
    weights = Weights(RandomSource(arch, backend.device), lambda fraction: None)
    return model_class(arch.family)(arch, max_length, weights, backend, LocalComm())
