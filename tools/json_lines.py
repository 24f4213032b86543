"""Files with a JSON value in each line."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


class LineError(Exception):
    """A line that cannot be used; the text is one line for the user, and names it."""


def json_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Number, from 1, and value of each line that is not empty. Raises `LineError` and `OSError`."""
    decode = msgspec.json.Decoder(kind).decode
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                value = decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise LineError(f"{path}: line {number}: {error}") from None
            yield number, value
