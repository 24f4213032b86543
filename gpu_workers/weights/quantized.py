"""A weight matrix that stays in the integers it has in the checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUP = 32  # consecutive inputs of a row that share a scale; what GGUF blocks have, and GPTQ and AWQ have a multiple of


@dataclass(slots=True, frozen=True)
class QuantizedWeight:
    """An [N, K] weight kept as integers: value = code * scale + minimum.

    There is one scale (and minimum) for each group of 32 consecutive inputs of a row. No checkpoint gives 8-bit codes
    with minimums. The tensors may be views.
    """

    bits: int  # 4 or 8
    codes: torch.Tensor  # [N, K]; uint8 0..15 with 4 bits, int8 -128..127 with 8 bits
    scales: torch.Tensor  # [N, K / 32] float32
    minimums: torch.Tensor | None  # [N, K / 32] float32; None: 0

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): output and input features."""
        return self.codes.shape[0], self.codes.shape[1]

    def narrow(self, axis: int, start: int, size: int) -> "QuantizedWeight":
        """Views of rows (axis 0) or inputs (axis 1) start to start + size; ValueError where that splits a group."""
        if axis == 0:
            return self._map(lambda tensor: tensor.narrow(0, start, size), self.codes.narrow(0, start, size))
        if start % GROUP or size % GROUP:
            raise ValueError(f"inputs {start} to {start + size} of a quantized weight: not a whole number of {GROUP}")
        groups = (start // GROUP, size // GROUP)
        return self._map(lambda tensor: tensor.narrow(1, *groups), self.codes.narrow(1, start, size))

    def rows(self, index: torch.Tensor) -> "QuantizedWeight":
        """The rows `index` [M] int64, in that order."""
        return self._map(lambda tensor: tensor[index], self.codes[index])

    def pad_rows(self, count: int) -> "QuantizedWeight":
        """`count` rows of zeros more at the end."""
        return self._map(lambda tensor: F.pad(tensor, (0, 0, 0, count)), F.pad(self.codes, (0, 0, 0, count)))

    def dequantize(self) -> torch.Tensor:
        """[N, K] float32."""
        rows, inputs = self.shape
        values = self.codes.float().view(rows, inputs // GROUP, GROUP).mul_(self.scales[..., None])
        if self.minimums is not None:
            values.add_(self.minimums[..., None])
        return values.view(rows, inputs)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor], codes: torch.Tensor) -> "QuantizedWeight":
        minimums = None if self.minimums is None else change(self.minimums)
        return QuantizedWeight(self.bits, codes, change(self.scales), minimums)


def cat(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The rows of all parts; ValueError unless they have the same bits and inputs."""
    kinds = sorted({(part.bits, part.shape[1]) for part in parts})
    if len(kinds) != 1:
        raise ValueError(f"quantized weights of different bits and inputs can't be one: {kinds}")
    minimums = None
    if any(part.minimums is not None for part in parts):
        minimums = torch.cat([_minimums(part) for part in parts])
    return QuantizedWeight(
        parts[0].bits,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        minimums,
    )


def _minimums(part: QuantizedWeight) -> torch.Tensor:
    return torch.zeros_like(part.scales) if part.minimums is None else part.minimums
