"""A tiny model of transformers as a GGUF file, laid out as llama.cpp's converter lays it out."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel


def pairs_from_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in the order 0, D/2, 1, D/2 + 1, ...: llama.cpp rotates neighbours."""
    size = tensor.shape[0] // heads
    order = torch.arange(size).view(2, size // 2).T.flatten()
    return tensor[(torch.arange(heads)[:, None] * size + order).flatten()]


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    matrices: str = "F32",
    rope_divisors: torch.Tensor | None = None,
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Matrices in the quantization type `matrices`, but in `kinds` by last name; everything else in float32."""
    config = model.config
    architecture = config.model_type
    assert architecture in ("llama", "qwen2")
    arch = gguf.MODEL_ARCH.LLAMA if architecture == "llama" else gguf.MODEL_ARCH.QWEN2
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    types = getattr(config, "layer_types", [])
    if "sliding_attention" in types:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.numpy())
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        count = heads.get(name.split(".")[-2])
        if architecture == "llama" and count:
            tensor = pairs_from_halves(tensor, count)
        kind = gguf.GGMLQuantizationType[kinds.get(name.split(".")[-2], matrices) if tensor.dim() == 2 else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
