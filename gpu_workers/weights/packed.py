"""Linears of GPTQ and AWQ checkpoints: 4- or 8-bit codes in int32 words.

value[n, k] = (code[n, k] - zero[n, g]) * scale[n, g], with the group g of input k. For a linear with N outputs, K
inputs, G groups and w = 32 / bits codes a word, the first in the lowest bits:

          qweight            qzeros         scales   g_idx         written by
    GPTQ  [K / w, N] int32   [G, N / w]     [G, N]   [K], or none  github.com/AutoGPTQ/AutoGPTQ (qlinear_cuda.py)
    AWQ   [K, N / w] int32   [G, N / w]     [G, N]   none          github.com/casper-hansen/AutoAWQ (linear/gemm.py)

A word of AWQ has its eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from config.quantization import Quantization
from gpu_workers.weights.quantized import GROUP, QuantizedWeight

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

PARTS = ("qweight", "qzeros", "scales", "g_idx")


def packed_shape(name: str, shapes: Mapping[str, tuple[int, ...]], quantization: Quantization) -> tuple[int, int]:
    """(N, K) of the linear `name`, from the shapes of its tensors by full name; ValueError where these don't agree."""
    for part in ("qweight", "qzeros", "scales"):
        if len(shapes.get(f"{name}.{part}", ())) != 2:
            raise ValueError(f"tensor {name}.{part} is missing or no matrix")
    codes_a_word = 32 // quantization.bits
    rows, columns = shapes[f"{name}.qweight"]
    inputs, outputs = (rows, columns * codes_a_word) if quantization.method == "awq" else (rows * codes_a_word, columns)
    groups = -(-inputs // (quantization.group_size or inputs))
    expected = {"qzeros": (groups, outputs // codes_a_word), "scales": (groups, outputs), "g_idx": (inputs,)}
    for part, shape in expected.items():
        found = shapes.get(f"{name}.{part}", shape)
        if found != shape:
            raise ValueError(
                f"tensor {name}.{part} is {list(found)} instead of {list(shape)}: it does not fit {name}.qweight, "
                f"{list(shapes[f'{name}.qweight'])}, with bits {quantization.bits} and group_size "
                f"{quantization.group_size or -1} of quantization_config"
            )
    return outputs, inputs


@dataclass(slots=True, frozen=True)
class PackedLinear:
    """The tensors of one linear, as they are in the checkpoint, with shapes that `packed_shape` has checked."""

    quantization: Quantization
    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor | None

    def dequantize(self) -> torch.Tensor:
        """[N, K] bfloat16, rounded as the blocks of GGUF files are (see `GGUFSource.read`)."""
        weight = self.integers()
        if weight is not None:
            return weight.dequantize().bfloat16()
        groups = self._groups()
        values = self._codes().float().sub_(self._zeros()[:, groups])
        return values.mul_(self._scales()[:, groups]).bfloat16()

    def integers(self) -> QuantizedWeight | None:
        """The codes; None where 32 consecutive inputs don't share a scale, or where int8 would need minimums.

        Codes of 8 bits become -128..127.
        """
        if not self.quantization.symmetric and self.quantization.bits == 8:
            return None
        groups = self._groups()
        inputs = groups.shape[0]
        if inputs % GROUP or not torch.equal(groups, self._groups_in_order(inputs)):
            return None
        codes, scales = self._codes(), self._scales()[:, groups[::GROUP]]
        if self.quantization.bits == 8:
            return QuantizedWeight(8, (codes ^ 128).view(torch.int8), scales, None)
        return QuantizedWeight(4, codes, scales, -self._zeros()[:, groups[::GROUP]] * scales)

    def _codes(self) -> torch.Tensor:
        """[N, K] uint8, from 0."""
        if self.quantization.method == "awq":
            return self._outputs(self.qweight)
        octets = self.qweight.t().contiguous().view(torch.uint8)
        if self.quantization.bits == 8:
            return octets
        return torch.stack((octets & 15, octets >> 4), dim=2).view(octets.shape[0], -1)

    def _zeros(self) -> torch.Tensor:
        """[N, G] float32."""
        if self.quantization.symmetric:
            # By definition; some quantizers store it without the offset that their checkpoint_format stands for.
            return torch.full_like(self.scales.t(), 1 << (self.quantization.bits - 1), dtype=torch.float32)
        return self._outputs(self.qzeros).float() + self.quantization.zero_offset

    def _outputs(self, words: torch.Tensor) -> torch.Tensor:
        """[R, N / w] int32 -> [N, R] uint8."""
        bits = self.quantization.bits
        order = _AWQ_ORDER if self.quantization.method == "awq" else range(32 // bits)
        words = words.t().contiguous()
        codes = torch.empty(words.shape[0], len(order), words.shape[1], dtype=torch.uint8)
        for index, position in enumerate(order):
            codes[:, position] = (words >> (index * bits)) & ((1 << bits) - 1)
        return codes.view(-1, words.shape[1])

    def _scales(self) -> torch.Tensor:
        """[N, G] float32."""
        return self.scales.t().float()

    def _groups(self) -> torch.Tensor:
        """[K] int64: the group of each input."""
        if self.g_idx is not None:
            return self.g_idx.long()
        codes_a_word = 1 if self.quantization.method == "awq" else 32 // self.quantization.bits
        return self._groups_in_order(self.qweight.shape[0] * codes_a_word)

    def _groups_in_order(self, inputs: int) -> torch.Tensor:
        return torch.arange(inputs) // (self.quantization.group_size or inputs)
