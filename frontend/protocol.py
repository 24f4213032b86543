"""Bodies of OpenAI's chat and completion requests, as typed structs. What they mean is in `frontend.requests`.

Fields beyond OpenAI's (`top_k`, `min_p`, ...) have the names that other open servers use. Every optional field may be
null. Fields that are not listed here are accepted and named in a response header.
"""

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ipc.validation import MAX_TOOLS

from .prompt_fields import CompletionLogprobs, PromptLogprobs
from .timings import Timings
from .unknown import Ignored

Role = Literal["system", "developer", "user", "assistant", "tool"]
MAX_DIGITS = 19  # of a logit_bias key; any int64 has no more


class StreamOptions(Struct):
    include_usage: bool | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None  # of the assistant


class FunctionCall(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    """A call, of the model or as a client sends it back."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(Struct):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: dict[str, Any] | None = None  # refused with an explanation
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None  # of the assistant, where others have content


class FunctionDefinition(Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    type: str
    function: FunctionDefinition | None = None


class NamedFunction(Struct):
    name: str


class NamedTool(Struct):
    type: str
    function: NamedFunction | None = None


class AllowedTools(Struct):
    """Those of a request's tools that may be called."""

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Meta(max_length=MAX_TOOLS)] | None = None


class ToolChoice(NamedTool, omit_defaults=True):
    """A `tool_choice` that is one function, or several that are allowed."""

    allowed_tools: AllowedTools | None = None


JsonSchema = dict[str, Any] | bool


class JsonSchemaFormat(Struct):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # false is treated like true: a weaker promise would help nobody
    schema: JsonSchema | None = None


class ResponseFormat(Struct):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct):
    """vLLM's; exactly one of the first five is to be given."""

    json: JsonSchema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    # Refused where they would change the output:
    structural_tag: Ignored = None
    whitespace_pattern: Ignored = None
    disable_additional_properties: Ignored = None


BiasKey = Annotated[str, Meta(max_length=MAX_DIGITS + 1)]


class SamplingFields(Struct, kw_only=True):
    """What both kinds of request share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[BiasKey, float] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    # Beyond OpenAI's:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | Literal["output"] | None = None  # "output" (ours): without those of the prompt
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    stop_on_loop: int | None = None  # end an output that ends in so many repeats; 0: never; null: the server's setting
    priority: int | None = None  # lower starts earlier, under --policy priority
    ttft_target_ms: float | None = None  # 429 at once when the first token is predicted to come later
    cache_pin_seconds: float | None = None  # keep the prompt's KV cached at least this long
    cache_salt: str | None = None  # prefixes are shared only between requests of one salt (and one API key)
    # Refused with an explanation:
    best_of: int | None = None
    early_stopping: bool | str | None = None
    # What the output must match; `frontend.grammars` reads them. The guided ones are vLLM's older names.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Ignored = None  # refused, unless it is null


class ChatRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None  # told to the templates of models that reason; "none": it shall not
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused with an explanation:
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    # Refused with an explanation:
    suffix: str | None = None


class EmbeddingRequest(Struct, kw_only=True):
    """Body of POST /v1/embeddings."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Refused with an explanation:
    dimensions: int | None = None


embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)
chat_decoder = msgspec.json.Decoder(ChatRequest)
completion_decoder = msgspec.json.Decoder(CompletionRequest)


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct):
    """OpenAI's error object."""

    error: ErrorBody


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | UnsetType = UNSET  # not OpenAI's: the stop string or id that matched, or "repetition_loop"
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


Choice = TypeVar("Choice", ChatChoice, CompletionChoice)


class CompletionResponse(Struct, Generic[Choice], kw_only=True):
    """Answer to a request that does not stream, of either kind."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # of chats: completions have them in their choices
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET  # for requests with the header x-tokenmill-timings


class Embedding(Struct):
    index: int
    embedding: list[float] | str  # numbers, or base64 of little-endian float32
    object: str = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(Struct):
    """Answer to an embedding request."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class Model(Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "tokenmill"
    pooling: str = "last"  # how embeddings are made of hidden states


class ModelList(Struct):
    data: list[Model]
    object: str = "list"
