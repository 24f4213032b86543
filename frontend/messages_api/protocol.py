"""Bodies of POST /v1/messages and /v1/messages/count_tokens. What they mean is in `request`.

Every optional field may be null. Fields that are not listed here are accepted and named in a response header.
https://docs.anthropic.com/en/api/messages
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ipc.validation import MAX_MESSAGES, MAX_TOOLS

from ..requests import MAX_PARTS
from ..translation import ExtraFields


class ToolResultBlock(Struct):
    """One block of a tool's result."""

    type: str
    text: str | None = None


class MessageBlock(Struct):
    """One block of a message's content."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None  # of tool_use
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of tool_result
    content: str | Annotated[list[ToolResultBlock], Meta(max_length=MAX_PARTS)] | None = None
    signature: str | None = None  # of thinking; nobody here checks it
    citations: Any = None  # of text as Anthropic's client sends it back, of no meaning
    data: str | None = None  # of redacted_thinking, which only Anthropic can read


Blocks = Annotated[list[MessageBlock], Meta(max_length=MAX_PARTS)]


class MessageTurn(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class MessagesTool(Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    type: str
    budget_tokens: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None


class OutputSchema(Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct):
    effort: str | None = None
    format: OutputSchema | None = None


class CountTokensRequest(ExtraFields, kw_only=True):
    """Body of POST /v1/messages/count_tokens: what decides the prompt."""

    model: str
    messages: Annotated[list[MessageTurn], Meta(max_length=MAX_MESSAGES)]
    system: str | Blocks | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None


messages_decoder = msgspec.json.Decoder(MessagesRequest)
count_tokens_decoder = msgspec.json.Decoder(CountTokensRequest)
