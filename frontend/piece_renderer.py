"""Rendering for APIs whose answer is one sequence of blocks (text, reasoning, tool calls), made from parsed pieces.

A stream and a whole answer come out of the same events: the whole one is what the last event would describe.
"""

from abc import abstractmethod
from collections.abc import Iterable
from functools import cache

import msgspec
from msgspec import Struct

from ipc.messages import Delta, Finished

from .generation import Batch
from .pieces import OutputParser, Piece, Reasoning
from .protocol import Usage
from .rendering import Renderer

_encode = msgspec.json.Encoder().encode


class Event(Struct, tag_field="type"):
    """One server-sent event, named by its tag."""


class PieceRenderer(Renderer):
    """Feeds the outputs of a request with one choice through a parser and puts the pieces into events."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._begun = False
        self._finished: Finished | None = None
        self._reasoning_tokens = 0  # of messages that brought nothing but reasoning

    def chunks(self, batch: Batch) -> bytes:
        return encode_events(self._events(batch))

    def end(self, usage: Usage) -> bytes:
        return encode_events(self._end(usage))

    def whole(self, batches: Iterable[Batch], usage: Usage) -> bytes:
        for batch in batches:
            self._events(batch)
        self._end(usage)
        return _encode(self._answer(usage))

    def _events(self, batch: Batch) -> list[Event]:
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            events += self._start(batch[0][1].prompt_tokens)
        for _, item in batch:
            for piece in self._pieces(item):
                events += self._add(piece)
        return events

    def _pieces(self, item: Delta | Finished) -> list[Piece]:
        if isinstance(item, Finished):
            self._finished = item
            return self._parser.finish()
        if item.in_reasoning:
            self._parser.begin_in_reasoning()
        pieces = self._parser.push(item.text)
        if pieces and isinstance(pieces[0], Reasoning) and all(isinstance(piece, Reasoning) for piece in pieces):
            self._reasoning_tokens += len(item.token_ids) // 4
        return pieces

    @abstractmethod
    def _start(self, prompt_tokens: int) -> list[Event]:
        """What a stream begins with, before any output."""

    @abstractmethod
    def _add(self, piece: Piece) -> list[Event]:
        """What one more piece means."""

    @abstractmethod
    def _end(self, usage: Usage) -> list[Event]:
        """What a stream ends with; called once, after `_finished` has been set."""

    @abstractmethod
    def _answer(self, usage: Usage) -> Struct:
        """The whole answer; called after `_end`."""


@cache
def _head(kind: type[Event]) -> bytes:
    """What stands before an event's data: its name once more, as both APIs have it."""
    return b"event: %b\ndata: " % str(kind.__struct_config__.tag).encode()


def encode_events(events: Iterable[Event]) -> bytes:
    """The wire form."""
    return b"".join([_head(type(event)) + _encode(event) + b"\n\n" for event in events])
