"""What a checkpoint format offers (`TensorSource`), and how a model takes tensors from it (`Weights`)."""

from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from config.shards import Span
from gpu_workers.weights.quantized import GROUP, QuantizedWeight
from gpu_workers.weights.rounding import can_round, rounded
from ipc.control import StartError

_NAMES_SHOWN = 8
_T = TypeVar("_T")
_P = ParamSpec("_P")


class TensorSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names."""

    @property
    def label(self) -> str:
        """The file or directory, for messages."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor in the checkpoint."""

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, dequantized; ValueError when its type is not supported."""

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """The whole tensor as the integers it has; None where it has none that can be multiplied as they are."""


class Weights:
    """Hands out tensors by name and expected shape, and keeps account of what nobody asked for."""

    def __init__(
        self,
        source: TensorSource,
        progress: Callable[[float], None],
        round_to: int | None = None,
        threads: int = 1,
    ) -> None:
        """`round_to`: bits of the integers that `take_quantized` makes of floats; None: it makes none.

        `threads`: how many make them.
        """
        self._source = source
        self._progress = progress
        self._round_to = round_to
        self._threads = threads
        self.left_floats: list[str] = []  # matrices that were to be rounded, but have parts of groups
        self._unread = set(source.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._source.shapes

    def require(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """StartError naming the tensors that are missing or of another shape than expected."""
        shapes = self._source.shapes
        missing = [name for name in expected if name not in shapes]
        if missing:
            raise StartError(f"{self._source.label} lacks {len(missing)} tensors of this model: {_listed(missing)}.")
        wrong = [
            f"{name} is {list(shapes[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if shapes[name] != shape
        ]
        if wrong:
            raise StartError(f"{self._source.label} does not fit its own configuration: {_listed(wrong)}.")

    def forbid_others(self, expected: Mapping[str, tuple[int, ...]], ignored: Callable[[str], bool]) -> None:
        """StartError naming the tensors that this model has no use for, except the `ignored` ones and biases of 0.

        AutoGPTQ gives every linear a bias, of zeros where the model has none.
        """
        others = [name for name in self._source.shapes if name not in expected and not ignored(name)]
        unknown = sorted(name for name in others if not (name.endswith(".bias") and self._is_zero(name)))
        if unknown:
            raise StartError(f"{self._source.label} has tensors that this model does not know: {_listed(unknown)}.")

    def _is_zero(self, name: str) -> bool:
        return not self._read(self._source.read, name).any()

    def take(self, name: str) -> torch.Tensor:
        """The tensor `name`, dequantized; StartError when it can't be read."""
        tensor = self._read(self._source.read, name)
        self._count(name)
        return tensor

    def take_quantized(
        self, parts: Mapping[str, Span], axis: int, least_bits: int | None = 4
    ) -> list[QuantizedWeight] | None:
        """Of each named matrix these rows (axis 0) or inputs (axis 1), as integers of the same bits.

        None where that is not how all of them are kept, and they are not to be rounded, or can't be: then `take` them.
        Floats are not rounded to fewer than `least_bits`; None: they are not rounded.
        """
        weights = self._integers_of(parts, axis)
        if weights is None and self._round_to is not None and least_bits is not None:
            shapes = self._source.shapes
            for name, span in parts.items():
                inputs = Span(0, shapes[name][1]) if axis == 0 else span
                if not can_round((shapes[name][0], inputs.count), inputs.start):
                    self.left_floats += parts
                    return None
            bits = max(self._round_to, least_bits)
            weights = [self._read(self._round, name, axis, span, bits) for name, span in parts.items()]
        if weights is not None:
            for name in parts:
                self._count(name)
        return weights

    def _integers_of(self, parts: Mapping[str, Span], axis: int) -> list[QuantizedWeight] | None:
        """As the checkpoint has them; None where not all are of the same bits, or a group would be split."""
        weights: list[QuantizedWeight] = []
        for name, span in parts.items():
            weight = self._read(self._source.read_quantized, name)
            if weight is None or (weights and weight.bits != weights[0].bits):
                return None
            if axis == 1 and (span.start % GROUP or span.count % GROUP):
                return None
            weights.append(weight.narrow(axis, span.start, span.count))
        return weights

    def _round(self, name: str, axis: int, span: Span, bits: int) -> QuantizedWeight:
        # Only what this rank needs: groups lie within rows, so they are the same in a part of the matrix.
        tensor = self._source.read(name).narrow(axis, span.start, span.count)
        try:
            return rounded(tensor, bits, self._threads)
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from error

    def _read(self, read: Callable[Concatenate[str, _P], _T], name: str, *rest: _P.args, **named: _P.kwargs) -> _T:
        try:
            return read(name, *rest, **named)
        except (OSError, ValueError) as error:
            raise StartError(f"The weights in {self._source.label} cannot be read: {error}") from error

    def _count(self, name: str) -> None:
        self._unread.discard(name)
        self._progress(1.0 - len(self._unread) / len(self._source.shapes))


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _NAMES_SHOWN} more" if len(items) > _NAMES_SHOWN else ""
    return ", ".join(items[:_NAMES_SHOWN]) + more
