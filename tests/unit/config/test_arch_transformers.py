"""`read_arch` against the config objects of transformers, and on directories that are broken in many ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from config.arch import read_arch
from config.schema import RopeConfig

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 1000,
    "max_position_embeddings": 777,
    "rms_norm_eps": 3e-6,
}
ARCHITECTURES = {
    LlamaConfig: "LlamaForCausalLM",
    MistralConfig: "MistralForCausalLM",
    Qwen2Config: "Qwen2ForCausalLM",
}
VARIANTS: list[tuple[type[PreTrainedConfig], dict[str, Any]]] = [
    (LlamaConfig, {}),
    (LlamaConfig, {"head_dim": 20, "bos_token_id": 0, "eos_token_id": 9}),
    (LlamaConfig, {"head_dim": None}),
    (LlamaConfig, {"num_key_value_heads": None}),
    (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    (LlamaConfig, {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    (MistralConfig, {"sliding_window": None}),
    (MistralConfig, {"sliding_window": None, "head_dim": 32, "tie_word_embeddings": True}),
    (MistralConfig, {"sliding_window": 64}),
    (MistralConfig, {}),
    (Qwen2Config, {}),
    (Qwen2Config, {"use_sliding_window": True}),
    (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 64}),
    (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": None}),
    (
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 3,
        },
    ),
    (Qwen2Config, {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 64}),
]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 4.5, "original_max_position_embeddings": 64}


def save(path: Path, config: PreTrainedConfig) -> None:
    config.architectures = [ARCHITECTURES[type(config)]]
    config.save_pretrained(path)
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}, path / "model.safetensors")


def windows_of(oracle: PreTrainedConfig) -> tuple[int, ...]:
    window = getattr(oracle, "sliding_window", None) or 0
    if isinstance(oracle, MistralConfig):
        return (window,) * oracle.num_hidden_layers
    types = getattr(oracle, "layer_types", None) or ["full_attention"] * oracle.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def rewrite(path: Path, changes: dict[str, Any], removed: tuple[str, ...] = ()) -> None:
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in removed}))


@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=str)
def test_every_field_is_what_transformers_reads(
    kind: type[PreTrainedConfig], changes: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, kind(**{**SIZES, **changes}))
    arch, oracle = read_arch(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert arch.family == "llama"
    assert arch.hidden_size == oracle.hidden_size
    assert arch.num_layers == oracle.num_hidden_layers
    assert arch.num_heads == oracle.num_attention_heads
    assert arch.num_kv_heads == oracle.num_key_value_heads
    assert arch.head_dim == (getattr(oracle, "head_dim", None) or oracle.hidden_size // oracle.num_attention_heads)
    assert arch.intermediate_size == oracle.intermediate_size
    assert arch.vocab_size == oracle.vocab_size
    assert arch.max_position == oracle.max_position_embeddings
    assert (arch.windows or (0,) * arch.num_layers) == windows_of(oracle)
    assert arch.rms_norm_eps == oracle.rms_norm_eps
    assert arch.tie_embeddings == oracle.tie_word_embeddings
    assert arch.qkv_bias == (getattr(oracle, "attention_bias", False) or kind is Qwen2Config)
    assert arch.o_bias == getattr(oracle, "attention_bias", False)
    assert arch.mlp_bias == getattr(oracle, "mlp_bias", False)
    assert {"silu": "silu", "gelu": "gelu_pytorch_tanh"}[arch.hidden_act] == oracle.hidden_act
    assert arch.eos_token_ids == (() if oracle.eos_token_id is None else (oracle.eos_token_id,))
    assert arch.rope == RopeConfig(theta=oracle.rope_parameters["rope_theta"])
    assert (arch.weight_bytes, arch.num_parameters) == (58, 17)
    assert arch.name == tmp_path.name


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16,
                "attention_factor": 1.25,
            },
        },
    ],
    ids=str,
)
def test_every_spelling_of_rope_settings_means_what_transformers_makes_of_it(
    spelling: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, LlamaConfig(**SIZES))
    rewrite(tmp_path, {}, removed=("rope_parameters", "rope_scaling", "rope_theta"))
    rewrite(tmp_path, spelling)
    rope, oracle = read_arch(tmp_path).rope, AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert rope.theta == oracle["rope_theta"]
    assert rope.type == oracle["rope_type"]
    assert rope.factor == oracle.get("factor", 1.0)
    assert rope.attention_factor == oracle.get("attention_factor")
    assert rope.low_freq_factor == oracle.get("low_freq_factor", 1.0)
    assert rope.high_freq_factor == oracle.get("high_freq_factor", 4.0)
    assert rope.beta_fast == oracle.get("beta_fast", 32.0)
    if rope.type in ("llama3", "yarn"):
        assert rope.original_max_position == oracle["original_max_position_embeddings"]


def test_eos_comes_from_all_configs_and_stays_inside_the_vocabulary(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SIZES, eos_token_id=[7, 1000]))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    added = [{"id": 3, "content": "<pad>"}, {"id": 999, "content": "<end>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert read_arch(tmp_path).eos_token_ids == (5, 7, 999)


BROKEN_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"architectures": None}, "architecture None is not supported"),
    ({"architectures": "LlamaForCausalLM"}, "architecture None is not supported"),
    ({"architectures": [["LlamaForCausalLM"]]}, "is not supported; supported: Llama"),
    ({"architectures": [{}]}, "is not supported; supported: Llama"),
    ({"hidden_size": None}, "hidden_size is None, not an integer"),
    ({"hidden_size": 96.0}, r"hidden_size is 96\.0, not an integer"),
    ({"hidden_size": True}, "hidden_size is True, not an integer"),
    ({"vocab_size": 1 << 31}, "vocab_size is 2147483648, not an integer"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0, not an integer"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1, not an integer"),
    ({"head_dim": 15}, "head size 15 is not even"),
    ({"head_dim": None, "num_attention_heads": 192, "num_key_value_heads": 192}, "head_dim is 0, not an integer"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', not a positive number"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1.*, not a positive number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a positive number"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, not a positive number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
    ({"hidden_act": ["silu"]}, "hidden_act .* is not supported; supported: silu"),
    ({"rope_parameters": None, "rope_scaling": [1]}, "rope_scaling is not an object"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "type .* is not supported; supported: default"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0, not a positive number"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": -1}, "rope_theta is -1"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN_VALUES, ids=lambda value: str(value)[:60])
def test_a_broken_value_is_named_with_its_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SIZES))
    rewrite(tmp_path, changes)
    with pytest.raises(ValueError, match=message) as caught:
        read_arch(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


BROKEN_FILES: list[tuple[str, str, str]] = [
    ("config.json", "", "not valid JSON"),
    ("config.json", "[]", "not a JSON object"),
    ("config.json", '{"hidden_size": 48', "not valid JSON"),
    ("config.json", '{"hidden_size": ' + "9" * 5000 + "}", "not valid JSON"),
    ("config.json", "[" * 100_000, "not valid JSON"),
    ("generation_config.json", "{", "not valid JSON"),
    ("generation_config.json", "3", "not a JSON object"),
    ("tokenizer_config.json", "nope", "not valid JSON"),
    (
        "tokenizer_config.json",
        '{"eos_token": "<e>", "added_tokens_decoder": {"x": {"content": "<e>"}}}',
        "the end-of-sequence token '<e>' has the id 'x', not a number",
    ),
    ("model.safetensors", "", "not a safetensors file"),
    ("model.safetensors", "\x7f" * 16, "not a safetensors file"),
    ("model.safetensors.index.json", "{}", "weight_map is not an object of file names"),
]


@pytest.mark.parametrize(("name", "text", "message"), BROKEN_FILES, ids=lambda value: value[:30])
def test_a_broken_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SIZES))
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_arch(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_bytes_that_are_not_utf8_are_no_json(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SIZES))
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff\xfe\xfd"}')
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_arch(tmp_path)


@pytest.mark.parametrize("added", [None, 5, [5], [{"content": "<e>"}], {"a": 1}])
def test_an_odd_tokenizer_file_ends_nothing_or_is_refused(added: object, tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SIZES, eos_token_id=4))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    if added == [{"content": "<e>"}]:
        with pytest.raises(ValueError, match="has the id None, not a number"):
            read_arch(tmp_path)
    else:
        assert read_arch(tmp_path).eos_token_ids == (4,)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such directory or \.gguf file"):
        read_arch(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"there is no config\.json in this directory"):
        read_arch(tmp_path)
    save(tmp_path, LlamaConfig(**SIZES))
    (tmp_path / "other.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"there are 2 \.safetensors files and no model\.safetensors\.index\.json"):
        read_arch(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"there are no \.safetensors files"):
        read_arch(tmp_path)
