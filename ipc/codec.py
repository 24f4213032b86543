"""Encoding of messages, and of the integer columns inside them."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class Decoder(Generic[T]):
    """Decodes one edge's union; whatever does not fit it raises `msgspec.DecodeError` or `ValidationError`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def __call__(self, data: bytes) -> T:
        try:
            return self._decoder.decode(data)
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None


def pack_ints(values: Iterable[int]) -> bytes:
    """int32 bytes of `values`; OverflowError when one does not fit."""
    return array("i", values).tobytes()


def unpack_ints(data: bytes) -> Sequence[int]:
    """The int32 values in `data`; ValueError when its length is not a multiple of 4."""
    values = array("i")
    values.frombytes(data)
    return values


def pack_int64s(values: Iterable[int]) -> bytes:
    """int64 bytes of `values`; OverflowError when one does not fit."""
    return array("q", values).tobytes()


def unpack_int64s(data: bytes) -> Sequence[int]:
    """The int64 values in `data`; ValueError when its length is not a multiple of 8."""
    values = array("q")
    values.frombytes(data)
    return values


def pack_floats(values: Iterable[float]) -> bytes:
    """float32 bytes of `values`."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> Sequence[float]:
    """The float32 values in `data`; ValueError when its length is not a multiple of 4."""
    values = array("f")
    values.frombytes(data)
    return values
