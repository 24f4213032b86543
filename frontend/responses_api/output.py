"""Output items as they grow: pieces in, stream events and finished items out.

One item is open at a time. It ends when a piece of another kind, or another call, begins.
"""

import uuid
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from ..piece_renderer import Event
from ..pieces import Piece, Reasoning, Text, ToolArguments, ToolCallBegin, is_whole
from .objects import (
    ArgumentsDelta,
    ArgumentsDone,
    FunctionCallItem,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    Status,
    TextDelta,
    TextDone,
)

_Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES: dict[_Kind, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class _Open(Struct):
    """The item that still grows."""

    kind: _Kind
    id: str
    call_id: str = ""
    name: str = ""
    texts: list[str] = []

    def item(self, status: Status) -> OutputItem:
        """As it is now; without its content while it is in progress."""
        text = "".join(self.texts)
        done = status != "in_progress"
        if self.kind == "message":
            return MessageItem(self.id, status, [OutputText(text)] if done else [])
        if self.kind == "reasoning":
            return ReasoningItem(self.id, status, [ReasoningText(text)] if done else [])
        return FunctionCallItem(self.id, status, self.call_id, self.name, text if done else "")


class Output:
    """`items` are the finished ones. `number` gives each event its sequence number."""

    def __init__(self, number: Callable[[], int]) -> None:
        self.items: list[OutputItem] = []
        self._number = number
        self._open: _Open | None = None

    def add(self, piece: Piece) -> list[Event]:
        """Events of one more piece."""
        match piece:
            case Text(text):
                return self._grow("message", text)
            case Reasoning(text):
                return self._grow("reasoning", text)
            case ToolCallBegin(_, call_id, name):
                events = self.close("completed")
                return events + self._begin(_Open("function_call", _new_id("function_call"), call_id, name))
            case ToolArguments(_, text):
                return self._grow("function_call", text)

    def close(self, status: Status) -> list[Event]:
        """End the open item, if there is one. A call that a stop cut is never complete."""
        opened, self._open = self._open, None
        if opened is None:
            return []
        if opened.kind == "function_call" and not is_whole("".join(opened.texts)):
            status = "incomplete"
        item = opened.item(status)
        at, number = len(self.items), self._number
        self.items.append(item)
        events: list[Event]
        match item:
            case MessageItem(content=[part]):
                events = [TextDone(number(), at, item.id, 0, part.text), PartDone(number(), at, item.id, 0, part)]
            case ReasoningItem(content=[thought]):
                events = [
                    ReasoningDone(number(), at, item.id, 0, thought.text),
                    PartDone(number(), at, item.id, 0, thought),
                ]
            case FunctionCallItem():
                events = [ArgumentsDone(number(), at, item.id, item.name, item.arguments)]
        return [*events, ItemDone(number(), at, item)]

    def _begin(self, opened: _Open) -> list[Event]:
        self._open = opened
        at, number = len(self.items), self._number
        events: list[Event] = [ItemAdded(number(), at, opened.item("in_progress"))]
        if opened.kind == "message":
            events.append(PartAdded(number(), at, opened.id, 0, OutputText("")))
        elif opened.kind == "reasoning":
            events.append(PartAdded(number(), at, opened.id, 0, ReasoningText("")))
        return events

    def _grow(self, kind: _Kind, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        opened = self._open
        if opened is None or opened.kind != kind:
            events += self.close("completed")
            opened = _Open(kind, _new_id(kind))
            events += self._begin(opened)
        opened.texts.append(text)
        at, number = len(self.items), self._number
        if kind == "message":
            events.append(TextDelta(number(), at, opened.id, 0, text))
        elif kind == "reasoning":
            events.append(ReasoningDelta(number(), at, opened.id, 0, text))
        else:
            events.append(ArgumentsDelta(number(), at, opened.id, text))
        return events


def _new_id(kind: _Kind) -> str:
    return _PREFIXES[kind] + uuid.uuid4().hex
