"""The operations of a forward, noted down in the order in which the native engine carries them out."""

from dataclasses import dataclass
from typing import Any

from gpu_workers.comm import Comm
from kernels.cpu.library import Code, Codes, Op


@dataclass(slots=True, frozen=True)
class Value:
    """An op's result in a recording: a buffer, until the next op that writes there."""

    buffer: int
    version: int
    logits_rows: bool = False


@dataclass(slots=True, frozen=True)
class Exchange:
    """Between two runs of operations: the ranks add up a buffer."""

    buffer: int
    width: int
    comm: Comm


@dataclass(slots=True)
class _Buffer:
    width: int
    quantizes: bool  # whether what writes there gives codes, too
    version: int = 0
    codes: Codes = Codes.NONE


class Recording:
    """The operations of a forward. Each kind of op has a buffer for each width, which its next use overwrites."""

    def __init__(self) -> None:
        self.parts: list[list[Op] | Exchange] = [[]]
        self.buffers: list[_Buffer] = []
        self._by_purpose: dict[tuple[str, int], int] = {}
        self.vocab_size = 0
        self._head = 0

    def output(self, purpose: str, width: int, quantizes: bool = False) -> Value:
        """A place for a result; whatever was in it is gone. `quantizes`: the op that writes there can give codes."""
        index = self._by_purpose.setdefault((purpose, width), len(self.buffers))
        if index == len(self.buffers):
            self.buffers.append(_Buffer(width, quantizes))
        self.buffers[index].version += 1
        return Value(index, self.buffers[index].version)

    def use(self, value: Value, codes: Codes = Codes.NONE) -> int:
        """The number of a buffer that is read or written; `codes`: the form that is needed besides float32."""
        buffer = self.buffers[value.buffer]
        if value.version != buffer.version:
            raise RuntimeError("the model's forward uses a result after the next op of its kind has overwritten it")
        if codes and not buffer.quantizes:
            raise RuntimeError("a quantized weight can only be multiplied with what a norm, an MLP or attention gives")
        buffer.codes |= codes
        return value.buffer

    def add(self, code: Code, **fields: Any) -> None:
        part = self.parts[-1]
        assert isinstance(part, list)
        part.append(Op(code=code, **fields))

    def begin_head(self) -> None:
        """What follows may be run again for other rows; in it the ranks exchange nothing."""
        part = self.parts[-1]
        assert isinstance(part, list)
        self._head = len(part)

    @property
    def head(self) -> list[Op]:
        """The operations of the head, which is the end of the last part."""
        part = self.parts[-1]
        assert isinstance(part, list)
        return part[self._head :]

    def exchange(self, value: Value, comm: Comm) -> None:
        self.parts += [Exchange(self.use(value), self.buffers[value.buffer].width, comm), []]
