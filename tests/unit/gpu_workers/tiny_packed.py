"""Quantizes matrices and packs them as AutoGPTQ and AutoAWQ document it, one element at a time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """[R, C] -> [R, C * bits / 32] int32; the i-th code of a word, from the lowest bits, is that at order[i]."""
    width = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // width), np.uint32)
    for r in range(words.shape[0]):
        for c in range(words.shape[1]):
            for i, position in enumerate(order or range(width)):
                words[r, c] |= np.uint32(int(codes[r, c * width + position]) << (i * bits))
    return torch.from_numpy(words.view(np.int32))


def pack(
    method: str,
    codes: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    groups: list[int] | None,
    bits: int = 4,
    stored_less: int = 0,
) -> dict[str, torch.Tensor]:
    """The tensors of a linear from codes [N, K], zeros [N, G], scales [N, G] and, in GPTQ, the group of each input."""
    tensors = {"scales": torch.from_numpy(np.ascontiguousarray(scales.T))}
    if method == "awq":
        tensors["qweight"] = pack_words(codes.T, bits, AWQ_ORDER)
        tensors["qzeros"] = pack_words(zeros.T, bits, AWQ_ORDER)
    else:
        tensors["qweight"] = pack_words(codes, bits).T.contiguous()
        tensors["qzeros"] = pack_words(zeros.T - stored_less, bits)
    if groups is not None:
        tensors["g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return tensors


def values(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: list[int]) -> torch.Tensor:
    """[N, K] float32."""
    result = torch.zeros(codes.shape)
    for n in range(codes.shape[0]):
        for k, g in enumerate(groups):
            result[n, k] = float(np.float32(int(codes[n, k]) - int(zeros[n, g])) * np.float32(scales[n, g]))
    return result


def quantize(
    matrix: torch.Tensor, bits: int, groups: list[int], symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], zeros [N, G] and scales [N, G] float16 that [N, K] takes between the extremes of each group."""
    rows, group_of, most = matrix.numpy(), np.array(groups), 2**bits - 1
    codes = np.zeros(rows.shape, np.int64)
    zeros = np.zeros((rows.shape[0], group_of.max() + 1), np.int64)
    scales = np.zeros(zeros.shape, np.float16)
    for n, row in enumerate(rows):
        for g in range(zeros.shape[1]):
            inputs = np.flatnonzero(group_of == g)
            low, high = row[inputs].min(), row[inputs].max()
            if symmetric:
                low, high = -max(high, -low), max(high, -low)
            scales[n, g] = (high - low) / most
            zeros[n, g] = (most + 1) // 2 if symmetric else np.clip(np.round(-low / scales[n, g]), 1, most)
            codes[n, inputs] = np.clip(np.round(row[inputs] / np.float32(scales[n, g])) + zeros[n, g], 0, most)
    return codes, zeros, scales


def write_checkpoint(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """A directory with one safetensors file and a config.json that has `config` as its quantization_config."""
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    config_path = path / "config.json"
    whole = json.loads(config_path.read_text()) if config_path.exists() else {}
    config_path.write_text(json.dumps({**whole, "quantization_config": config}))
    return path


def pack_model(path: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Replace the linears of the layers in the checkpoint `path` by packed ones; the weights it now stands for."""
    method, bits = config["quant_method"], config["bits"]
    packed, dequantized = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            packed[name] = dequantized[name] = tensor
            continue
        inputs = tensor.shape[1]
        size = inputs if config["group_size"] == -1 else config["group_size"]
        groups = [k // size for k in range(inputs)]
        quantized = quantize(tensor, bits, groups, config.get("sym", False))
        dequantized[name] = values(*quantized, groups)
        linear = name.removesuffix(".weight")
        for part, data in pack(
            method, *quantized, groups if method == "gptq" else None, bits, int(method == "gptq")
        ).items():
            packed[f"{linear}.{part}"] = data
        if method == "gptq" and f"{linear}.bias" not in packed:  # as AutoGPTQ does
            packed.setdefault(f"{linear}.bias", torch.zeros(tensor.shape[0]))
    write_checkpoint(path, packed, config)
    return dequantized
