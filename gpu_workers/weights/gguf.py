"""Tensors from a GGUF file, under their Hugging Face names and in the Hugging Face order of rows.

Block formats: github.com/ggml-org/ggml/blob/master/src/ggml-common.h; a block holds 32 consecutive elements of a row,
one of K-quants 256. Those whose elements come in groups of 32, of 4 or 8 bits, can be multiplied as they are. The
others (Q2_K, Q3_K, Q5_K, Q6_K, Q5_0, Q5_1, IQ4_NL, IQ4_XS) are dequantized by the `gguf` package.
"""

import mmap
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import torch

from config.gguf_file import GGUFFile, TensorInfo
from gpu_workers.weights.quantized import GROUP, QuantizedWeight

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hugging_face_name(name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


class GGUFSource:
    """Reads one tensor at a time from the memory-mapped file."""

    def __init__(self, path: Path) -> None:
        file = GGUFFile(path)
        self.label = str(path)
        self._infos = {_hugging_face_name(name): info for name, info in file.tensors.items()}
        self.shapes = {name: info.shape for name, info in self._infos.items()}
        with path.open("rb") as opened:
            # A private mapping: torch asks for writable memory, which nobody writes to.
            self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        # llama.cpp rotates neighbouring elements, so its converter reorders the rows of Q and K of llama models.
        self._heads: dict[str, int] = {}
        if file.metadata["general.architecture"] == "llama":
            heads = file.metadata["llama.attention.head_count"]
            self._heads = {"q_proj": heads, "k_proj": file.metadata.get("llama.attention.head_count_kv", heads)}

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype, or in bfloat16 where the file has quantized blocks.

        The same weights are served whatever dtype is computed in, so that float32 output is the yardstick of bfloat16
        output, and so that both are those of the reference this project is tested with, which was made from bfloat16
        weights: its log-probabilities agree to 1e-4 with these, and differ by 0.01 on average from those of exactly
        dequantized ones (SmolLM2, Q4_1). The rounding, at most 1 in 256, is small beside what 4 bits have cost already.
        """
        info = self._infos[name]
        tensor = dequantize(info, self._bytes(info))
        if info.type not in _PLAIN:
            tensor = tensor.bfloat16()
        heads = self._interleaved_heads(name)
        return tensor if heads is None else _halves_from_pairs(tensor, heads)

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """The integers of a matrix in quantized blocks, exactly as in the file; None for other tensors."""
        info = self._infos[name]
        if info.type not in _BLOCKS or len(info.shape) != 2:
            return None
        weight = _from_blocks(info, self._bytes(info))
        heads = self._interleaved_heads(name)
        return weight if heads is None else weight.rows(_halves_from_pairs(torch.arange(info.shape[0]), heads))

    def _bytes(self, info: TensorInfo) -> torch.Tensor:
        return torch.frombuffer(self._data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)

    def _interleaved_heads(self, name: str) -> int | None:
        """Heads of a tensor whose rows llama.cpp's converter has reordered, None for the others."""
        return self._heads.get(name.split(".")[-2]) if "." in name else None


def _halves_from_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from the order 0, D/2, 1, D/2 + 1, ... back to 0, 1, 2, ..."""
    rows = tensor.shape[0]
    return tensor.view(heads, rows // heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def dequantize(info: TensorInfo, data: torch.Tensor) -> torch.Tensor:
    """The bytes `data` (uint8) of a tensor as floats [*info.shape]; ValueError names an unsupported type."""
    if info.type in _PLAIN:
        return data.view(_PLAIN[info.type]).view(info.shape)
    if info.type in _BLOCKS:
        return _from_blocks(info, data).dequantize().view(info.shape)
    if info.type in _DEQUANTIZED:
        rows = data.view(-1, info.num_bytes * info.shape[-1] // info.num_elements).numpy()
        return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[info.type])).view(info.shape)
    supported = ", ".join([*_PLAIN, *_BLOCKS, *_DEQUANTIZED])
    raise ValueError(f"tensor {info.name} has the type {info.type}, which is not supported ({supported} are)")


def _from_blocks(info: TensorInfo, data: torch.Tensor) -> QuantizedWeight:
    """A tensor in quantized blocks as integers [all axes but the last, last axis]."""
    elements, block_bytes, decode = _BLOCKS[info.type]
    return decode(data.view(-1, info.shape[-1] // elements, block_bytes))


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The float16 at byte `begin` of each block [rows, groups, block bytes], as float32 [rows, groups]."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _nibbles(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The 16 bytes from byte `begin` of each block as codes 0..15 [rows, K], uint8: the low halves come first."""
    packed = blocks[..., begin:].contiguous()
    halves = (packed & 15, packed >> 4)
    return torch.stack(halves, dim=2).view(packed.shape[0], -1)


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    """scale, 32 x int8."""
    codes = blocks[..., 2:].contiguous().view(torch.int8).view(blocks.shape[0], -1)
    return QuantizedWeight(8, codes, _half(blocks, 0), None)


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    """scale, 32 x 4 bits; 8 stands for zero."""
    scales = _half(blocks, 0)
    return QuantizedWeight(4, _nibbles(blocks, 2), scales, scales * -8)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    """scale, minimum, 32 x 4 bits."""
    return QuantizedWeight(4, _nibbles(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    """scale, scale of minimums, 8 pairs of 6 bits that these are multiplied by, 4 x (2 x 32) x 4 bits.

    Of the 12 bytes of pairs, the first four have in their lower six bits multipliers 0 to 3 of scales, the next four
    those of minimums; the last four have the lower halves of 4 to 7 of both, whose upper two bits top the bytes before.
    """
    rows = blocks.shape[0]
    first, second, third = (blocks[..., begin : begin + 4] for begin in (4, 8, 12))
    of_scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    of_minimums = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    scales = _half(blocks, 0)[..., None] * of_scales
    minimums = _half(blocks, 2)[..., None] * of_minimums
    packed = blocks[..., 16:].reshape(rows, -1, 4, 1, GROUP)
    codes = torch.cat((packed & 15, packed >> 4), dim=3)
    return QuantizedWeight(4, codes.view(rows, -1), scales.view(rows, -1), -minimums.view(rows, -1))


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS: dict[str, tuple[int, int, Callable[[torch.Tensor], QuantizedWeight]]] = {  # elements, bytes, decoder
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
}
_DEQUANTIZED = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
