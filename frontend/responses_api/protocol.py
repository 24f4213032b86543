"""The body of POST /v1/responses. What it means is in `request`.

Every optional field may be null. Fields that are not listed here are accepted and named in a response header.
https://platform.openai.com/docs/api-reference/responses/create
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ipc.validation import MAX_MESSAGES, MAX_TOOLS

from ..requests import MAX_PARTS
from ..translation import ExtraFields

MAX_INCLUDE = 16

# OpenAI's bounds.
_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)]


class InputPart(Struct):
    """Of a message, a tool's output, or reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None
    # What outputs have as well, of no meaning in an input:
    annotations: Any = None
    logprobs: Any = None


Parts = Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]


class InputItem(Struct):
    """One item of the input: a turn of the conversation or a part of one. Without a type it is a message."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None  # of a message, or (parts only) of reasoning
    summary: Parts | None = None  # of reasoning
    call_id: str | None = None  # of function_call and function_call_output
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    # What outputs have as well, of no meaning in an input:
    id: str | None = None
    status: str | None = None


class ResponsesTool(Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolName(Struct, omit_defaults=True):
    type: str
    name: str | None = None


class ResponsesToolChoice(Struct, omit_defaults=True):
    type: str
    name: str | None = None  # of a function
    mode: Literal["auto", "required"] | None = None  # of allowed_tools
    tools: Annotated[list[ResponsesToolName], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(Struct, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(ExtraFields, kw_only=True):
    """Body of POST /v1/responses."""

    model: str
    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None  # vLLM's
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Metadata | None = None
    stream: bool | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDE)] | None = None
    top_logprobs: int | None = None
    # Refused with an explanation:
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None


responses_decoder = msgspec.json.Decoder(ResponsesRequest)
