"""What a checkpoint says about its model: from a Hugging Face directory or a GGUF file to one `ModelArch`."""

import math
from pathlib import Path
from typing import Any, Literal, cast, get_args

from msgspec import structs

from config.gguf_file import GGUFFile
from config.json_fields import Fields, optional_json, read_json
from config.memory_plan import parameter_count
from config.pooling import pooling_of_directory, pooling_of_gguf
from config.quantization import read_quantization
from config.safetensors_files import has_safetensors, safetensors_headers
from config.schema import ModelArch, RopeConfig
from config.weight_formats import declared_formats, gguf_formats, safetensors_formats

# Hugging Face architecture -> our model family
_FAMILIES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "llama"}
_GGUF_FAMILIES = {"llama": "llama", "qwen2": "llama"}

_RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
_ROPE_TYPES: tuple[str, ...] = get_args(_RopeType)


def read_arch(path: Path, needs_weights: bool = True) -> ModelArch:
    """Architecture of the model in the directory or .gguf file `path`; ValueError says what is wrong with it.

    Without `needs_weights`, a directory may lack safetensors files: then config.json says in which formats they are.
    """
    if path.is_dir():
        return _from_directory(path, needs_weights)
    if path.is_file():
        return _from_gguf(GGUFFile(path))
    raise ValueError(f"{path}: no such directory or .gguf file")


# --- Hugging Face directory ------------------------------------------------------------------------------------------


def _from_directory(path: Path, needs_weights: bool) -> ModelArch:
    config_path = path / "config.json"
    if not config_path.exists():
        raise ValueError(f"{path}: there is no config.json in this directory")
    config = read_json(config_path)
    fields = Fields(str(config_path), config)
    names = config.get("architectures") or []
    architecture = names[0] if isinstance(names, list) and names else None
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise ValueError(
            f"{config_path}: architecture {architecture} is not supported; supported: {', '.join(sorted(_FAMILIES))}"
        )
    quantization = read_quantization(config, str(config_path))
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    attention_bias = fields.flag("attention_bias")
    arch = _checked(
        ModelArch(
            family=_FAMILIES[architecture],
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", hidden_size // num_heads),
            intermediate_size=fields.integer("intermediate_size"),
            vocab_size=fields.integer("vocab_size"),
            max_position=fields.integer("max_position_embeddings", 2048),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope_from_config(fields),
            windows=_windows_from_config(fields, architecture, num_layers),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias and architecture == "LlamaForCausalLM",
            mlp_bias=fields.flag("mlp_bias"),
            hidden_act=_activation(fields.source, config.get("hidden_act", "silu")),
            eos_token_ids=_eos_from_directory(path, config),
            name=path.resolve().name,
            pooling=pooling_of_directory(path),
        ),
        fields.source,
    )
    if not needs_weights and not has_safetensors(path):
        formats = declared_formats(config, quantization)
        return structs.replace(arch, num_parameters=parameter_count(arch), formats=formats)
    tensors = safetensors_headers(path)
    formats, num_parameters = safetensors_formats(tensors, quantization)
    return structs.replace(
        arch,
        weight_bytes=sum(header.num_bytes for header in tensors.values()),
        num_parameters=num_parameters,
        formats=formats,
    )


def _activation(source: str, name: Any) -> str:
    kinds = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"{source}: hidden_act {name!r} is not supported; supported: {', '.join(kinds)}")
    return kinds[name]


def _windows_from_config(fields: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    """As transformers reads them: Mistral's window is every layer's, Qwen2's that of its last layers or those named."""
    mistral, qwen2 = architecture == "MistralForCausalLM", architecture == "Qwen2ForCausalLM"
    used = mistral or (qwen2 and fields.flag("use_sliding_window"))
    absent = 4096  # transformers' window where there is no such setting; null is no window
    if not used or fields.values.get("sliding_window", absent) is None:
        return ()
    window = fields.integer("sliding_window", absent)
    if mistral:
        return (window,) * num_layers
    types = fields.values.get("layer_types")
    if types is None:
        whole = min(fields.integer("max_window_layers", 28, least=0), num_layers)
        return (0,) * whole + (window,) * (num_layers - whole)
    names = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in tuple(names) for kind in types):
        raise ValueError(
            f"{fields.source}: layer_types is not a list of {num_layers} of {', '.join(names)}, one for each layer"
        )
    return tuple(names[kind] for kind in types)


def _rope_from_config(fields: Fields) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    entry = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(entry, dict):
        raise ValueError(f"{fields.source}: rope_scaling is not an object")
    rope = Fields(f"{fields.source}: rope settings", entry)
    kind = entry.get("rope_type") or entry.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise ValueError(f"{rope.source}: type {kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"{rope.source}: partial_rotary_factor other than 1 is not supported")
    if entry.get("truncate") is False:
        raise ValueError(f"{rope.source}: truncate false is not supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    max_position = fields.integer("max_position_embeddings", 2048)
    original = rope.integer("original_max_position_embeddings", max_position)
    return RopeConfig(
        theta=theta,
        type=cast(_RopeType, kind),
        factor=rope.number("factor", max_position / original),
        # transformers scales dynamic NTK from max_position_embeddings, whatever the entry says of the original
        original_max_position=max_position if kind == "dynamic" else original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope) if kind == "yarn" else None,
    )


def _yarn_attention_factor(rope: Fields) -> float | None:
    """DeepSeek's `mscale` and `mscale_all_dim` are another way of writing `attention_factor`."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        factor = max(rope.number("factor"), 1.0)
        scale, scale_all = (0.1 * rope.number(key) * math.log(factor) + 1.0 for key in ("mscale", "mscale_all_dim"))
        return scale / scale_all
    return None


def _eos_from_directory(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Every id that one of the three configs calls the end of a sequence: they often disagree, and all are meant."""
    ids: set[int] = set()
    for source in (config, optional_json(path / "generation_config.json")):
        value = source.get("eos_token_id")
        ids.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    tokenizer = optional_json(path / "tokenizer_config.json")
    token = tokenizer.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str):
        added = tokenizer.get("added_tokens_decoder")
        if isinstance(added, dict):
            named = [(key, entry) for key, entry in added.items() if isinstance(entry, dict)]
        else:
            entries = optional_json(path / "tokenizer.json").get("added_tokens")
            entries = entries if isinstance(entries, list) else []
            named = [(entry.get("id"), entry) for entry in entries if isinstance(entry, dict)]
        for number, entry in named:
            if entry.get("content") == token:
                if not str(number).isdecimal():
                    raise ValueError(f"{path}: the end-of-sequence token {token!r} has the id {number!r}, not a number")
                ids.add(int(number))
    return tuple(sorted(ids))


# --- GGUF ------------------------------------------------------------------------------------------------------------


def _from_gguf(file: GGUFFile) -> ModelArch:
    metadata, tensors = file.metadata, file.tensors
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _GGUF_FAMILIES:
        raise ValueError(
            f"{file.path}: architecture {architecture} is not supported; supported: {', '.join(sorted(_GGUF_FAMILIES))}"
        )
    prefix = f"{architecture}."
    plain = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    fields = Fields(f"{file.path}: {architecture} metadata", plain)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path}: there is no token_embd.weight matrix in this file")
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    num_layers = fields.integer("block_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{file.path}: keys and values of different head sizes are not supported")
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{file.path}: rotary embedding of a part of the head is not supported")
    if "expert_count" in plain and fields.integer("expert_count", least=0) > 0:
        raise ValueError(f"{file.path}: mixture-of-experts models are not supported")
    eos_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = [metadata.get(f"tokenizer.ggml.{key}") for key in eos_keys]
    return _checked(
        ModelArch(
            family=_GGUF_FAMILIES[architecture],
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=fields.integer("feed_forward_length"),
            vocab_size=embedding.shape[0],
            max_position=fields.integer("context_length"),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-5),
            rope=_rope_from_gguf(fields),
            windows=_windows_from_gguf(fields, architecture, num_layers),
            tie_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            eos_token_ids=tuple(sorted({item for item in eos if isinstance(item, int)})),
            weight_bytes=sum(info.num_bytes for info in tensors.values()),
            num_parameters=sum(info.num_elements for info in tensors.values()),
            formats=gguf_formats(tensors),
            name=file.path.stem,
            pooling=pooling_of_gguf(metadata, architecture),
        ),
        str(file.path),
    )


def _windows_from_gguf(fields: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    """As llama.cpp reads them: the pattern says which layers have the window, or that each n-th one has none.

    Without a pattern, all layers of a llama have it. Of a Qwen2 only some would, so nobody knows which: none.
    """
    window, key = fields.integer("attention.sliding_window", 0, least=0), "attention.sliding_window_pattern"
    pattern = fields.values.get(key)
    if not window or (pattern is None and architecture == "qwen2"):
        return ()
    if not isinstance(pattern, list):
        period = fields.integer(key, 0, least=0)  # 0: every layer has it
        pattern = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
    if len(pattern) != num_layers or any(has_window not in (False, True) for has_window in pattern):
        raise ValueError(f"{fields.source}: {key} is not a list of {num_layers} truth values, one for each layer")
    return tuple(window if has_window else 0 for has_window in pattern) if any(pattern) else ()


def _rope_from_gguf(fields: Fields) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.values.get("rope.scaling.type", "none")
    if kind == "none":
        # Files from before rope.scaling.type have the linear factor alone.
        factor = fields.number("rope.scale_linear", 1.0)
        return RopeConfig(theta=theta) if factor == 1.0 else RopeConfig(theta=theta, type="linear", factor=factor)
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{fields.source}: rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    factor = fields.number("rope.scaling.factor")
    attention_factor = None
    if "rope.scaling.attn_factor" in fields.values:
        # ggml multiplies this by YaRN's own factor; the Hugging Face setting replaces it.
        attention_factor = fields.number("rope.scaling.attn_factor") * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return RopeConfig(
        theta=theta,
        type=kind,
        factor=factor,
        original_max_position=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        attention_factor=attention_factor,
    )


def _checked(arch: ModelArch, source: str) -> ModelArch:
    if arch.num_heads % arch.num_kv_heads:
        raise ValueError(f"{source}: {arch.num_heads} attention heads are no multiple of {arch.num_kv_heads} KV heads")
    if arch.head_dim < 2 or arch.head_dim % 2:
        raise ValueError(f"{source}: head size {arch.head_dim} is not even, which rotary embedding needs")
    # An id outside the vocabulary can't be generated, so it can't end anything.
    eos = tuple(item for item in arch.eos_token_ids if 0 <= item < arch.vocab_size)
    return structs.replace(arch, eos_token_ids=eos)
