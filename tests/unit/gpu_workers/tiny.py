"""Tiny random models of transformers, saved as checkpoints, and batches for our models."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from config.arch import read_arch
from gpu_workers.backends import make_backend
from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import Comm, LocalComm
from gpu_workers.models.llama import LlamaModel
from gpu_workers.weights.loader import open_source
from gpu_workers.weights.source import Weights

BLOCK_SIZE = 16


def save_tiny(path: Path, family: str = "llama", **settings: Any) -> PreTrainedModel:
    """A random model in float32 with weights large enough that its logits differ; saved to `path`."""
    values: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "eos_token_id": 2,
    }
    values.update(settings)
    torch.manual_seed(1)
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**values))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**values))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and 1, which hides mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.eval().save_pretrained(path)
    return model


def load_tiny(
    path: Path,
    dtype: str = "float32",
    comm: Comm | None = None,
    max_length: int | None = None,
    kernels: str = "auto",
) -> LlamaModel:
    weights = Weights(open_source(path), lambda fraction: None)
    backend = make_backend("cpu", dtype, None, True, kernels)
    return LlamaModel(read_arch(path), max_length, weights, backend, comm or LocalComm())


def make_batch(parts: list[tuple[list[int], int, list[int]]], block_size: int = BLOCK_SIZE) -> ForwardBatch:
    """From (token ids, position of the first, block table) of each sequence; logits of every token are wanted."""
    ids, positions, slots, starts, contexts = [], [], [], [0], []
    tables = torch.full((len(parts), max(len(table) for _, _, table in parts)), 1 << 30, dtype=torch.int32)
    for index, (tokens, first, table) in enumerate(parts):
        tables[index, : len(table)] = torch.tensor(table, dtype=torch.int32)
        for position, token in enumerate(tokens, start=first):
            ids.append(token)
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
        starts.append(len(ids))
        contexts.append(first + len(tokens))
    return ForwardBatch(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=starts,
        context_lens=contexts,
        block_tables=tables,
        logits_rows=torch.arange(len(ids)),
    )


def whole_logits(model: LlamaModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocabulary] from one prefill."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    kv = model.allocate_kv(blocks + 1, BLOCK_SIZE)
    return model.forward(make_batch([(tokens, 0, list(range(blocks, 0, -1)))]), kv)
