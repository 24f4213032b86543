"""`read_arch` on configs as transformers writes them, and on ones it must refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.arch import read_arch
from tests.unit.gpu_workers.tiny import save_tiny


def edit(path: Path, **changes: Any) -> None:
    values = json.loads((path / "config.json").read_text())
    values.update(changes)
    (path / "config.json").write_text(json.dumps(values))


def test_b088_eos_is_the_union_over_all_configs(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    tokenizer = {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"9": {"content": "<end>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert read_arch(tmp_path).eos_token_ids == (2, 7, 9)


def test_both_spellings_of_rope_settings_mean_the_same(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    edit(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    new = read_arch(tmp_path).rope
    edit(tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert read_arch(tmp_path).rope == new
    assert (new.theta, new.type, new.factor, new.original_max_position) == (5e5, "llama3", 8.0, 64)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("Mistral", {"sliding_window": 100}, (100, 100, 100)),
        ("Mistral", {"sliding_window": None}, ()),
        ("Mistral", {}, (4096, 4096, 4096)),
        ("Llama", {"sliding_window": 100}, ()),  # Llama has none, whatever stands there
        ("Qwen2", {"sliding_window": 100}, ()),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}, (0, 0, 100)),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096, 4096)),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 28}, (0, 0, 0)),
    ],
)
def test_sliding_windows_do_not_bound_the_served_length(
    architecture: str, changes: dict[str, Any], windows: tuple[int, ...], tmp_path: Path
) -> None:
    save_tiny(tmp_path)
    edit(tmp_path, architectures=[f"{architecture}ForCausalLM"], **changes)
    arch = read_arch(tmp_path)
    assert (arch.windows, arch.max_position) == (windows, 256)


QWEN2_WINDOW = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported; supported: Llama"),
        ({"hidden_size": "48"}, "hidden_size is '48', not an integer"),
        ({"num_key_value_heads": 4}, "6 attention heads are no multiple of 4 KV heads"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method None is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "type 'longrope' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0, not an integer from 1"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "8"}, "sliding_window is '8', not an integer"),
        (QWEN2_WINDOW | {"use_sliding_window": 1}, "use_sliding_window is 1, not true or false"),
        (QWEN2_WINDOW | {"max_window_layers": -1}, "max_window_layers is -1, not an integer from 0"),
        (QWEN2_WINDOW | {"layer_types": ["full_attention"] * 2}, "layer_types is not a list of 3 of full_attention, "),
        (QWEN2_WINDOW | {"layer_types": ["full_attention"] * 2 + ["chunked"]}, "layer_types is not a list of 3"),
        (QWEN2_WINDOW | {"layer_types": [{}, [], 1]}, "layer_types is not a list of 3"),
        (QWEN2_WINDOW | {"layer_types": "full_attention"}, "layer_types is not a list of 3"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_arch(tmp_path)


def test_the_model_file(model_path: Path) -> None:
    arch = read_arch(model_path)
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (30, 9, 3, 64)
    assert (arch.vocab_size, arch.tie_embeddings, arch.eos_token_ids) == (49152, True, (2,))
    assert arch.num_parameters == 134515008
