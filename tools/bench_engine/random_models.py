"""Models of public shapes with random weights: what a step costs does not depend on their values."""

from collections.abc import Mapping

import torch

from config.schema import ModelArch
from gpu_workers.backend import Backend
from gpu_workers.comm import LocalComm
from gpu_workers.models import model_class
from gpu_workers.models.llama import LlamaModel, expected_tensors
from gpu_workers.weights.quantized import QuantizedWeight
from gpu_workers.weights.source import Weights
from tools.model_shapes import LLAMA_3_1_8B, QWEN_2_5_1_5B, SMOLLM2_135M

_SPREAD = 0.02  # standard deviation, as models are initialised

SHAPES = {"llama-3.1-8b": LLAMA_3_1_8B, "qwen2.5-1.5b": QWEN_2_5_1_5B, "smollm2-135m": SMOLLM2_135M}


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
