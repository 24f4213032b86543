"""The Llama definition against transformers, and its independence of how a sequence is cut into steps."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_workers.models.llama import check_tensor_parallel
from ipc.control import StartError
from tests.unit.gpu_workers.tiny import load_tiny, make_batch, save_tiny, whole_logits

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa1": {"num_key_value_heads": 6},
    "gqa3": {"num_key_value_heads": 2},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "head_dim": {"head_dim": 20},
    "head_dim_null": {"head_dim": None},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "llama_bias": {"attention_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "odd_width": {"intermediate_size": 101, "hidden_size": 60},
    "qwen2": {"family": "qwen2"},
    "qwen2_tied": {"family": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 3},
    "mistral": {"family": "mistral", "sliding_window": 40},
    "qwen2_window": {"family": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen2_layer_types": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 70,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "rope_theta": 50000.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(131), k=count)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, kernels: str, tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, **VARIANTS[variant])
    tokens = tokens_of(0, 150)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    actual = whole_logits(load_tiny(tmp_path, kernels=kernels), tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_dynamic_rope_is_that_of_the_served_length(kernels: str, tmp_path: Path) -> None:
    """transformers recomputes the frequencies as a sequence grows; we use those of the longest one from the start."""
    oracle = save_tiny(tmp_path, **VARIANTS["dynamic"])
    tokens = tokens_of(0, 400)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    actual = whole_logits(load_tiny(tmp_path, max_length=400, kernels=kernels), tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["gqa3", "gqa8", "odd_width", "qwen2", "mistral", "qwen2_layer_types"])
def test_chunks_decoding_and_company_do_not_change_a_bit(
    variant: str, dtype: str, kernels: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, **VARIANTS[variant])
    model = load_tiny(tmp_path, dtype, kernels=kernels)
    tokens = tokens_of(1, 201)
    expected = whole_logits(model, tokens)
    for seed in range(4):
        rng = random.Random(seed)
        kv = model.allocate_kv(80, 16)
        blocks = rng.sample(range(80), 80)
        table, others = blocks[:13], [(blocks[13 + 5 * i : 18 + 5 * i], tokens_of(10 + i, 70)) for i in range(6)]
        progress = [0] * len(others)
        position = 0
        while position < len(tokens):
            count = min(rng.choice((1, 1, 1, 2, 5, 17, 64, 90)), len(tokens) - position)
            parts = [(tokens[position : position + count], position, table)]
            for index, (other_table, other_tokens) in enumerate(others):
                step = rng.choice((0, 1, 1, 9))
                new = other_tokens[progress[index] : progress[index] + step]
                if new:
                    parts.append((new, progress[index], other_table))
                    progress[index] += len(new)
            order = rng.sample(range(len(parts)), len(parts))
            batch = make_batch([parts[i] for i in order])
            start = batch.query_starts[order.index(0)]
            logits = model.forward(batch, kv)[start : start + count]
            assert torch.equal(logits, expected[position : position + count]), (seed, position, count)
            position += count


@pytest.mark.parametrize("block_size", [1, 16, 24, 128])
def test_any_block_size_gives_the_same_logits(block_size: int, kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_tiny(tmp_path, kernels=kernels)
    tokens = tokens_of(2, 140)
    table = random.Random(0).sample(range(150), -(-140 // block_size))
    kv = model.allocate_kv(150, block_size)
    prefill = model.forward(make_batch([(tokens[:-1], 0, table)], block_size), kv).clone()
    last = model.forward(make_batch([(tokens[-1:], 139, table)], block_size), kv)
    torch.testing.assert_close(torch.cat((prefill, last)), whole_logits(model, tokens), rtol=0, atol=1e-5)


def test_only_the_wanted_rows_are_returned(kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_tiny(tmp_path, kernels=kernels)
    tokens = tokens_of(3, 30)
    batch = make_batch([(tokens, 0, [1, 0])])
    expected = whole_logits(model, tokens)
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    fields["logits_rows"] = torch.tensor([29, 4])
    logits = model.forward(type(batch)(**fields), model.allocate_kv(2, 16))
    assert torch.equal(logits, expected[[29, 4]])


def test_a_tp_of_more_ranks_than_heads_is_refused_with_the_valid_ones(tmp_path: Path) -> None:
    save_tiny(tmp_path, num_attention_heads=12, num_key_value_heads=12, hidden_size=48)
    arch = load_tiny(tmp_path).arch
    with pytest.raises(StartError, match=r"--tp 13 .* valid values: 1 to 12\."):
        check_tensor_parallel(arch, 13)
    check_tensor_parallel(arch, 12)
