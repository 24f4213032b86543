"""Outputs in the form of the Messages API."""

import uuid

import msgspec
from msgspec import Struct

from ..errors import ApiError
from ..piece_renderer import Event, PieceRenderer, encode_events
from ..pieces import OutputParser, Piece, Reasoning, Text, ToolArguments, ToolCallBegin, is_whole
from ..protocol import Usage
from ..requests import Job
from ..translation import Names
from .errors import error_event
from .objects import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputJsonDelta,
    MessageDelta,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)


class _Open(Struct):
    """The block that still grows: as it began, and what has come since."""

    block: ContentBlock
    texts: list[str] = []

    def whole(self) -> ContentBlock:
        text = "".join(self.texts)
        match self.block:
            case TextBlock():
                return TextBlock(text)
            case ThinkingBlock():
                return ThinkingBlock(text)
            case ToolUseBlock(id, name):
                return ToolUseBlock(id, name, _object(text))


class MessagesRenderer(PieceRenderer):
    """The answer to one request: a `message` object, or the events in which it comes about.

    A block ends when a piece of another kind, or another call, begins. How many tokens of the prompt came from the
    cache is known at the end only: `message_start` counts all of them as input, and the counts in `message_delta` take
    their place, as Anthropic's client has it.
    """

    keep_alive = encode_events([Ping()])

    def __init__(self, job: Job, names: Names, parser: OutputParser) -> None:
        super().__init__(parser)
        self._stop_sequences = job.params.stop
        self._names = names
        self._blocks: list[ContentBlock] = []
        self._open: _Open | None = None
        self._can_be_called = False  # the last call
        self._message = MessageObject(id="msg_" + uuid.uuid4().hex, model=job.model, usage=MessageUsage(0, 0))

    def _start(self, prompt_tokens: int) -> list[Event]:
        message = msgspec.structs.replace(self._message, usage=MessageUsage(prompt_tokens, 0))
        return [MessageStart(message), Ping()]

    def _add(self, piece: Piece) -> list[Event]:
        match piece:
            case ToolCallBegin(_, call_id, name):
                return self._close() + self._begin(ToolUseBlock(call_id, name))
            case Text(text):
                return self._grow(TextBlock(), text, TextDelta(text))
            case Reasoning(text):
                return self._grow(ThinkingBlock(), text, ThinkingDelta(text))
            case ToolArguments(_, text):
                assert self._open is not None  # it comes after the beginning of its call
                return self._grow(self._open.block, text, InputJsonDelta(text))

    def _begin(self, block: ContentBlock) -> list[Event]:
        self._open = _Open(block)
        return [BlockStart(len(self._blocks), block)]

    def _grow(self, block: ContentBlock, text: str, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        if self._open is None or type(self._open.block) is not type(block):
            events = self._close() + self._begin(block)
        assert self._open is not None
        self._open.texts.append(text)
        return [*events, BlockDelta(len(self._blocks), delta)]

    def _close(self) -> list[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        self._blocks.append(opened.whole())
        if isinstance(opened.block, ToolUseBlock):
            self._can_be_called = is_whole("".join(opened.texts))
        return [BlockStop(len(self._blocks) - 1)]

    def _end(self, usage: Usage) -> list[Event]:
        events = self._close()
        stop_reason, stop_sequence = self._stop_reason()
        cached = usage.prompt_tokens_details.cached_tokens
        self._message = msgspec.structs.replace(
            self._message,
            content=list(self._blocks),
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cache_read_input_tokens=cached),
            timings=self.timings,
        )
        delta = StopDelta(stop_reason, stop_sequence)
        return [*events, MessageDelta(delta, self._message.usage, self._message.timings), MessageStop()]

    def _stop_reason(self) -> tuple[str, str | None]:
        end = self._finished
        assert end is not None
        if end.reason == "length":
            return "max_tokens", None
        if isinstance(end.stop_reason, str) and end.stop_reason in self._stop_sequences:
            return "stop_sequence", end.stop_reason
        return ("tool_use" if self._can_be_called else "end_turn"), None

    def _answer(self, usage: Usage) -> MessageObject:
        return self._message

    def error(self, error: ApiError) -> bytes:
        """Anthropic's error event."""
        return encode_events([error_event(self._names.translate(error))])


def _object(arguments: str) -> dict[str, object]:
    """A call's arguments; empty where the output was cut inside them."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return {}
