"""What a checkpoint says about its model: from a Hugging Face directory or a GGUF file to one `ModelArch`."""

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any, Literal, cast, get_args

from msgspec import structs

from config.gguf_file import GGUFFile
from config.schema import ModelArch, RopeConfig

# Hugging Face architecture -> our model family
_FAMILIES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "llama"}
_GGUF_FAMILIES = {"llama": "llama", "qwen2": "llama"}

_RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
_ROPE_TYPES: tuple[str, ...] = get_args(_RopeType)
_MAX_SAFETENSORS_HEADER = 100 << 20  # bytes, the format's own limit


def read_arch(path: Path) -> ModelArch:
    """Architecture of the model in the directory or .gguf file `path`; ValueError says what is wrong with it."""
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_gguf(GGUFFile(path))
    raise ValueError(f"{path}: no such directory or .gguf file")


# --- Hugging Face directory ------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ValueError when it is anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # bad syntax, bad UTF-8, or an integer of thousands of digits
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


class _Fields:
    """Checked access to the values of a config."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source = source
        self.values = values

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise ValueError(f"{self.source}: {key} is {value!r}, not an integer from {least} to 2^31 - 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{self.source}: {key} is {value!r}, not a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{self.source}: {key} is {value!r}, not true or false")
        return bool(value)


def _from_directory(path: Path) -> ModelArch:
    config_path = path / "config.json"
    if not config_path.exists():
        raise ValueError(f"{path}: there is no config.json in this directory")
    config = read_json(config_path)
    fields = _Fields(str(config_path), config)
    names = config.get("architectures") or []
    architecture = names[0] if isinstance(names, list) and names else None
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise ValueError(
            f"{config_path}: architecture {architecture} is not supported; supported: {', '.join(sorted(_FAMILIES))}"
        )
    if config.get("quantization_config"):
        raise ValueError(f"{config_path}: quantized safetensors checkpoints (quantization_config) are not supported")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    max_position = fields.integer("max_position_embeddings", 2048)
    window = config.get("sliding_window")
    if window is not None and (architecture != "Qwen2ForCausalLM" or config.get("use_sliding_window")):
        # A window that never fills is no window: serve the lengths at which it makes no difference.
        max_position = min(max_position, fields.integer("sliding_window"))
    attention_bias = fields.flag("attention_bias")
    weight_bytes, num_parameters = safetensors_sizes(path)
    return _checked(
        ModelArch(
            family=_FAMILIES[architecture],
            hidden_size=hidden_size,
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", hidden_size // num_heads),
            intermediate_size=fields.integer("intermediate_size"),
            vocab_size=fields.integer("vocab_size"),
            max_position=max_position,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope_from_config(fields),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias and architecture == "LlamaForCausalLM",
            mlp_bias=fields.flag("mlp_bias"),
            hidden_act=_activation(fields.source, config.get("hidden_act", "silu")),
            bos_token_id=config.get("bos_token_id") if isinstance(config.get("bos_token_id"), int) else None,
            eos_token_ids=_eos_from_directory(path, config),
            weight_bytes=weight_bytes,
            num_parameters=num_parameters,
            name=path.resolve().name,
        ),
        fields.source,
    )


def _activation(source: str, name: Any) -> str:
    kinds = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"{source}: hidden_act {name!r} is not supported; supported: {', '.join(kinds)}")
    return kinds[name]


def _rope_from_config(fields: _Fields) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    entry = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(entry, dict):
        raise ValueError(f"{fields.source}: rope_scaling is not an object")
    rope = _Fields(f"{fields.source}: rope settings", entry)
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


def _yarn_attention_factor(rope: _Fields) -> float | None:
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
    for source in (config, _optional_json(path / "generation_config.json")):
        value = source.get("eos_token_id")
        ids.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    tokenizer = _optional_json(path / "tokenizer_config.json")
    token = tokenizer.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str):
        added = tokenizer.get("added_tokens_decoder")
        if isinstance(added, dict):
            named = [(key, entry) for key, entry in added.items() if isinstance(entry, dict)]
        else:
            entries = _optional_json(path / "tokenizer.json").get("added_tokens")
            entries = entries if isinstance(entries, list) else []
            named = [(entry.get("id"), entry) for entry in entries if isinstance(entry, dict)]
        for number, entry in named:
            if entry.get("content") == token:
                if not str(number).isdecimal():
                    raise ValueError(f"{path}: the end-of-sequence token {token!r} has the id {number!r}, not a number")
                ids.add(int(number))
    return tuple(sorted(ids))


def safetensors_files(path: Path) -> list[Path]:
    """The checkpoint's files: those of model.safetensors.index.json, or the single one there is."""
    index_path = path / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index_path}: weight_map is not an object of file names")
        names = sorted(set(weight_map.values()))
        for name in names:
            if name != Path(name).name or not name.endswith(".safetensors"):
                raise ValueError(f"{index_path}: {name!r} is not the name of a safetensors file beside it")
            if not (path / name).exists():
                raise ValueError(f"{index_path}: {name} is missing: the download is incomplete")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        found = "no" if not files else f"{len(files)}"
        raise ValueError(f"{path}: there are {found} .safetensors files and no model.safetensors.index.json")
    return files


def safetensors_sizes(path: Path) -> tuple[int, int]:
    """(bytes, elements) of all tensors in the directory, from the files' headers."""
    num_bytes = elements = 0
    for file_path in safetensors_files(path):
        for name, entry in _safetensors_header(file_path).items():
            if name == "__metadata__":
                continue
            try:
                begin, end = entry["data_offsets"]
                num_bytes += end - begin
                elements += math.prod(entry["shape"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file_path}: the header entry of {name!r} is malformed") from error
    return num_bytes, elements


def _safetensors_header(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_SAFETENSORS_HEADER, size - 8):
            raise ValueError(f"{path}: not a safetensors file (its header length is {length})")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not a safetensors file (its header is not JSON)") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: not a safetensors file (its header is not an object)")
    return header


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
    fields = _Fields(f"{file.path}: {architecture} metadata", plain)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path}: there is no token_embd.weight matrix in this file")
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{file.path}: keys and values of different head sizes are not supported")
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{file.path}: rotary embedding of a part of the head is not supported")
    if "expert_count" in plain and fields.integer("expert_count", least=0) > 0:
        raise ValueError(f"{file.path}: mixture-of-experts models are not supported")
    eos_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = [metadata.get(f"tokenizer.ggml.{key}") for key in eos_keys]
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return _checked(
        ModelArch(
            family=_GGUF_FAMILIES[architecture],
            hidden_size=hidden_size,
            num_layers=fields.integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=fields.integer("feed_forward_length"),
            vocab_size=embedding.shape[0],
            max_position=fields.integer("context_length"),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-5),
            rope=_rope_from_gguf(fields),
            tie_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=tuple(sorted({item for item in eos if isinstance(item, int)})),
            weight_bytes=sum(info.num_bytes for info in tensors.values()),
            num_parameters=sum(info.num_elements for info in tensors.values()),
            name=file.path.stem,
        ),
        str(file.path),
    )


def _rope_from_gguf(fields: _Fields) -> RopeConfig:
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
