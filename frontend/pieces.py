"""What an output consists of for a client: text, reasoning and tool calls, told apart as they arrive.

Parsers are in `frontend.parsers`; each API's responder puts pieces into its own form. Pieces of one output come in the
order in which they were generated; a call's arguments come after its beginning and before that of the next call.
"""

from abc import ABC, abstractmethod

import msgspec
from msgspec import Struct


class Text(Struct, frozen=True):
    """More of the visible answer."""

    text: str


class Reasoning(Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallBegin(Struct, frozen=True):
    """A call begins: the `call`-th of this output, counted from 0."""

    call: int
    id: str
    name: str


class ToolArguments(Struct, frozen=True):
    """More of a call's arguments, which are one JSON object when all have been put together."""

    call: int
    text: str


Piece = Text | Reasoning | ToolCallBegin | ToolArguments


class OutputParser(ABC):
    """Takes the text of one choice as it arrives. Text that may yet turn out to be markup waits for what follows."""

    def begin_in_reasoning(self) -> None:
        """The prompt has already opened the reasoning (`Delta.in_reasoning`); does nothing after the first `push`."""
        return

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """Pieces that are certain now."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """The output has ended: what is left."""


def is_whole(arguments: str) -> bool:
    """Whether these are the arguments of a call that can be made: the output may have ended inside them."""
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
