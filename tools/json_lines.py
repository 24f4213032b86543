"""Files with a JSON value in each line."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"

Lines = Iterable[tuple[int, bytes]]


class LineError(Exception):
    """A line that cannot be used; the text is one line for the user, and names it."""


def text_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and text of each line that is not empty. The file is read once: it may be a pipe.

    Raises `LineError` and `OSError`.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if number == 1:
                if text.startswith(_GZIP):
                    raise LineError(f"{path}: it is compressed: use gunzip first")
                text = text.removeprefix(_BYTE_ORDER_MARK)
            if text.strip():
                yield number, text


def decoded(path: Path, lines: Lines, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Number and value of each line of `path`. Raises `LineError`."""
    decode = msgspec.json.Decoder(kind).decode
    for number, text in lines:
        try:
            value = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineError(f"{path}: line {number}: {error}") from None
        yield number, value


def json_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Number, from 1, and value of each line that is not empty. Raises `LineError` and `OSError`."""
    return decoded(path, text_lines(path), kind)
