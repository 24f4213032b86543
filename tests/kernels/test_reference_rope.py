"""The oracle's rope frequencies against transformers' own."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.reference import rope_frequencies

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("linear", {"factor": 4.0}, 0),
    ("dynamic", {"factor": 4.0}, 0),
    ("dynamic", {"factor": 4.0}, 9000),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048}, 0),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0, "beta_slow": 2.0}, 0),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048, "attention_factor": 1.5}, 0),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
        0,
    ),
]


@pytest.mark.parametrize(("kind", "settings", "length"), CASES)
def test_frequencies_are_those_of_transformers(kind: str, settings: dict[str, Any], length: int) -> None:
    parameters = {"rope_type": kind, "rope_theta": 50000.0, **settings}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=parameters
    )
    expected, scale = ROPE_INIT_FUNCTIONS[kind](config, device=None, seq_len=length or None)
    ours = {key: value for key, value in settings.items() if key != "original_max_position_embeddings"}
    original = settings.get("original_max_position_embeddings", 4096)
    actual, our_scale = rope_frequencies(64, 50000.0, kind, original_max_position=original, max_length=length, **ours)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert our_scale == pytest.approx(scale)
