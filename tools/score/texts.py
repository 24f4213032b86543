"""Texts for perplexity: read from a file, tokenized as the server does, cut into pieces."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def read_texts(path: Path) -> list[str]:
    """The texts of a JSON Lines file (*.jsonl), or a file of any other name as one text.

    Each line is an object with a string `text`, or with strings `input` and `output`, which are joined by a line break
    unless one of them is empty. Texts may be empty. ValueError names a line that is none of this; OSError.
    """
    try:
        content = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from None
    if path.suffix != ".jsonl":
        return [content]
    # Not splitlines: JSON may hold line separators of Unicode as they are.
    return [_text_of(line, f"{path}: line {number}") for number, line in enumerate(content.split("\n"), 1) if line]


def _text_of(line: str, place: str) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    names = ("text",) if isinstance(row, dict) and "text" in row else ("input", "output")
    parts = [row.get(name) if isinstance(row, dict) else None for name in names]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{place}: not an object with a string text, or with strings input and output")
    return "\n".join(part for part in parts if part)


def pieces(
    texts: Iterable[str], encode: Callable[[str], list[int]], length: int, most: int | None = None
) -> list[list[int]]:
    """Token ids of at least 2 and at most `length` tokens each, none twice.

    A longer text becomes several pieces, of which each is scored without what stood before it. `most`: tokens that are
    scored in all, which are those after the first of each piece; the last piece is cut to it.
    """
    found: dict[tuple[int, ...], None] = {}
    left = most
    for text in texts:
        tokens = encode(text)
        for start in range(0, len(tokens), length):
            whole = tuple(tokens[start : start + length])
            piece = whole if left is None else whole[: left + 1]
            # Cut, one that was there before would look like another.
            if len(piece) < 2 or piece in found or whole in found:
                continue
            found[piece] = None
            if left is not None:
                left -= len(piece) - 1
        if left == 0:
            break
    return [list(piece) for piece in found]
