"""The objects and the stream events of the Messages API, with the fields that Anthropic's client asks for.

https://docs.anthropic.com/en/api/messages and .../messages-streaming
"""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ..piece_renderer import Event
from ..timings import Timings


class TextBlock(Struct, frozen=True, tag="text"):
    text: str = ""


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    thinking: str = ""
    signature: str = ""  # nothing here checks that a thought comes back unchanged


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct):
    """`input_tokens` leaves out those that were read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageObject(Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET  # for requests with the header x-tokenmill-timings


class MessageStart(Event, tag="message_start"):
    message: MessageObject


class Ping(Event, tag="ping"):
    pass


class BlockStart(Event, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(Struct, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    partial_json: str


class BlockDelta(Event, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(Event, tag="content_block_stop"):
    index: int


class StopDelta(Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Event, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET


class MessageStop(Event, tag="message_stop"):
    pass


class ErrorObject(Struct):
    type: str
    message: str


class ErrorEvent(Event, tag="error"):
    """Both the body of an error response and the event in a stream."""

    error: ErrorObject
    request_id: str | UnsetType = UNSET


class TokenCount(Struct):
    input_tokens: int
