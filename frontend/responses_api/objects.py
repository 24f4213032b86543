"""The objects and the stream events of the Responses API, with the fields that OpenAI's client asks for.

https://platform.openai.com/docs/api-reference/responses/object and .../responses-streaming
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from ..piece_renderer import Event
from ..timings import Timings
from .protocol import Metadata, ReasoningConfig, ResponsesToolChoice, TextConfig

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class MessageItem(Struct, frozen=True, tag="message"):
    id: str
    status: Status
    content: list[OutputText] = []
    role: str = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    id: str
    status: Status
    content: list[ReasoningText] = []
    summary: list[Any] = []


class FunctionCallItem(Struct, frozen=True, tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem
ContentPart = OutputText | ReasoningText


class FunctionTool(Struct, tag="function"):
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


class Response(Struct, kw_only=True):
    """A response as it is at one moment."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningConfig
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextConfig
    tool_choice: str | ResponsesToolChoice
    tools: list[FunctionTool]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: Metadata
    timings: Timings | UnsetType = UNSET  # for requests with the header x-tokenmill-timings, at the end


class InputTokens(Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class NumberedEvent(Event):
    """`sequence_number` counts the events of a stream from 0."""

    sequence_number: int


class _OfResponse(NumberedEvent):
    response: Response


class Created(_OfResponse, tag="response.created"):
    pass


class InProgress(_OfResponse, tag="response.in_progress"):
    pass


class Completed(_OfResponse, tag="response.completed"):
    pass


class Incomplete(_OfResponse, tag="response.incomplete"):
    pass


class Failed(_OfResponse, tag="response.failed"):
    pass


class ErrorEvent(NumberedEvent, tag="error"):
    code: str | None
    message: str
    param: str | None


class _OfItem(NumberedEvent):
    output_index: int


class ItemAdded(_OfItem, tag="response.output_item.added"):
    item: OutputItem


class ItemDone(_OfItem, tag="response.output_item.done"):
    item: OutputItem


class _OfPart(_OfItem):
    item_id: str
    content_index: int


class PartAdded(_OfPart, tag="response.content_part.added"):
    part: ContentPart


class PartDone(_OfPart, tag="response.content_part.done"):
    part: ContentPart


class TextDelta(_OfPart, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Any] = field(default_factory=list)


class TextDone(_OfPart, tag="response.output_text.done"):
    text: str
    logprobs: list[Any] = field(default_factory=list)


class ReasoningDelta(_OfPart, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfPart, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta"):
    item_id: str
    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done"):
    item_id: str
    name: str
    arguments: str
