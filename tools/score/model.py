"""The model in this process, alone, and the logits of whole sequences."""

from pathlib import Path
from typing import Any

import torch

from config.arch import read_arch
from gpu_workers.backend import Backend
from gpu_workers.backends import make_backend
from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import LocalComm
from gpu_workers.models import model_class
from gpu_workers.models.llama import LlamaModel
from gpu_workers.weights.loader import bits_of, open_source
from gpu_workers.weights.quantized import QuantizedWeight
from gpu_workers.weights.source import TensorSource, Weights

_BLOCK_SIZE = 16


def load(
    path: Path,
    dtype: str,
    threads: int | None,
    kernels: str = "auto",
    quantization: str = "none",
    kv_dtype: str = "float32",
    device: str = "cpu",
) -> LlamaModel:
    """The model as a server with these settings has it; StartError or ValueError when it can't be loaded."""
    quantized = quantization != "none"
    backend = make_backend(
        device, dtype, threads, deterministic=True, kernels=kernels, quantized=quantized, kv_dtype=kv_dtype
    )
    return assemble(path, backend, quantization)


def load_exact(path: Path, threads: int | None) -> LlamaModel:
    """The model in float32 with plain torch operations, its quantized weights dequantized without any rounding.

    A yardstick of what computing with integers costs: `load` with torch operations rounds such weights to bfloat16,
    which differs from what the file says by as much again. Raises as `load`.
    """
    backend = make_backend("cpu", "float32", threads, deterministic=True, kernels="torch", quantized=False)
    return assemble(path, backend, "none", exact=True)


def assemble(path: Path, backend: Backend, quantization: str, exact: bool = False) -> LlamaModel:
    """The model of the checkpoint `path` on one rank; `exact`: see `load_exact`. Raises as `load`."""
    arch = read_arch(path)
    source = open_source(path)
    bits = bits_of(quantization, backend)
    weights = Weights(_Exact(source) if exact else source, lambda fraction: None, bits)
    return model_class(arch.family)(arch, None, weights, backend, LocalComm())


class _Exact:
    """Tensors of another source as float32, those of integers with all their digits."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.label = source.label
        self.shapes = source.shapes

    def read(self, name: str) -> torch.Tensor:
        weight = self._source.read_quantized(name)
        return self._source.read(name).float() if weight is None else weight.dequantize()

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        return None


def allocate_kv(model: LlamaModel, tokens: int) -> Any:
    """A KV pool for one sequence of at most `tokens` tokens."""
    return model.allocate_kv(-(-tokens // _BLOCK_SIZE), _BLOCK_SIZE)


def logits(model: LlamaModel, kv: Any, tokens: list[int], first: int) -> torch.Tensor:
    """Logits [len(tokens) - first, vocabulary], float32, after `first + 1` tokens and each one more; one prefill.

    On the CPU, whatever the model's device. They are good until the next call. What `kv` held before is overwritten.
    """
    count = len(tokens)
    blocks = -(-count // _BLOCK_SIZE)
    device = model.backend.device
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens, device=device),
        positions=torch.arange(count, device=device),
        slots=torch.arange(count, device=device),
        query_starts=[0, count],
        context_lens=[count],
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        logits_rows=torch.arange(first, count, device=device),
    )
    return model.forward(batch, kv).cpu()
