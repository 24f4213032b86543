"""Tokens to text, one token at a time, one detokenizer per choice.

Only generated tokens go in. What the prompt ends with is at most context for decoders that need it and is never part of
the output, even when the prompt ends inside a character.
"""

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING = 4  # no character has more UTF-8 bytes, and a token that leaves one incomplete carries at least one byte
_CONTEXT = 8  # tokens that a decoder may look back at; WordPiece and its kind look at one


class Detokenizer(Protocol):
    """Text of a growing token sequence."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character waits for its tail."""

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes one U+FFFD."""


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings (byte-level BPE, SentencePiece with byte fallback).

    The deltas concatenate to `b"".join(bytes of the tokens).decode("utf-8", "replace")`: an incomplete character is
    held back, each maximal invalid subpart becomes one U+FFFD (Unicode standard, section 3.9; so does WHATWG Encoding).
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skip: Collection[int] = ()) -> None:
        """`token_bytes` maps an id to its bytes; ids in `skip` have no text."""
        self._token_bytes = token_bytes
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class WindowDetokenizer:
    """For any other decoder: the difference between decoding a window of last tokens with and without the new one.

    It relies on the decoder being local (a token's text depends on a few tokens before it) and not taking back text
    that it has once given.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], context: Sequence[int] = (), skip: Collection[int] = ()
    ) -> None:
        """`decode` is the one-shot decoder; `context` is the prompt, of which the last few tokens are used."""
        self._decode = decode
        self._skip = skip
        self._window = [token for token in context[-_CONTEXT:] if token not in skip]
        self._emitted = len(self._decode(self._window).rstrip(REPLACEMENT)) if self._window else 0
        self._pending = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._pending < _MAX_PENDING:
            self._pending += 1
            return ""
        delta = text[self._emitted :]
        self._emitted = len(text)
        self._pending = 0
        if len(self._window) > 2 * _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            self._emitted = len(self._decode(self._window))
        return delta

    def flush(self) -> str:
        if not self._pending:
            return ""
        self._pending = 0
        text = self._decode(self._window)
        delta = text[self._emitted :]
        self._emitted = len(text)
        return delta
