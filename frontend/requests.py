"""What an OpenAI request means: its prompts and sampling parameters, or an `ApiError` that names the parameter."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ipc.codec import pack_ints
from ipc.engine_client import RequestOptions
from ipc.messages import ChatMessage, ChatPrompt, ModelInfo, SamplingParams, TextPrompt, TokenPrompt, ToolCall
from ipc.validation import InvalidRequest, check_characters, validate_options, validate_params, validate_prompt

from . import protocol
from .errors import ApiError
from .grammars import grammar_of
from .parsers import OutputFormat
from .reasoning import thinking_kwargs
from .tools import tool_request

T = TypeVar("T")

MAX_PROMPTS = 128  # in one completion request
MAX_PARTS = 1024  # in the content of one message
MAX_SALT = 256  # characters of cache_salt
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only
_ROLES = {"developer": "system"}  # OpenAI's newer word; chat templates know the older one


class Job(Struct, frozen=True):
    """A request as the engine sees it. Choice `i * n + j` is the j-th answer to prompt i."""

    prompts: tuple[TextPrompt | ChatPrompt | TokenPrompt, ...]
    params: SamplingParams
    model: str  # the name that the client asked for
    stream: bool
    include_usage: bool
    echo: bool = False  # the prompt comes before the output
    return_token_ids: bool = False  # of the output
    return_prompt_token_ids: bool = False
    options: RequestOptions = {}  # of those, what a body can say
    cache_salt: str = ""
    prompt_logprobs: int | None = None  # that the answer lists; `params` may ask for more, for the echo's
    renamed: dict[str, str] = {}  # parameters of the engine that came in under another name
    output_format: OutputFormat = OutputFormat()


def chat_job(body: protocol.ChatRequest, model: ModelInfo) -> Job:
    """The job of a chat request."""
    check_model(body.model, model)
    _refuse_unsupported(body)
    tools = tool_request(body, model)
    if body.modalities not in (None, ["text"]):
        raise ApiError(400, 'modalities must be ["text"]: the model generates nothing else', param="modalities")
    if body.audio is not None:
        raise ApiError(400, "audio is not supported: the model generates text only", param="audio")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    prompt = chat_prompt(
        body.messages,
        body.add_generation_prompt,
        body.continue_final_message,
        tools.shown,
        _template_kwargs(body, model),
    )
    renamed = {"logprobs": "top_logprobs", **tools.renamed}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        renamed["max_tokens"] = "max_completion_tokens"
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return tools.apply(_job(body, (prompt,), max_tokens, logprobs, model, renamed))


def ignored(body: protocol.SamplingFields, model: ModelInfo) -> list[str]:
    """Names of the fields that were given and have no effect."""
    found = {
        "store": body.store,
        "reasoning_effort": isinstance(body, protocol.ChatRequest)
        and body.reasoning_effort is not None
        and not _thinking(body, model),
    }
    return [name for name, given in found.items() if given]


def _thinking(body: protocol.ChatRequest, model: ModelInfo) -> dict[str, Any]:
    effort = body.reasoning_effort
    return {} if effort is None else thinking_kwargs(model, effort != "none", effort)


def _template_kwargs(body: protocol.ChatRequest, model: ModelInfo) -> bytes:
    told = {**_thinking(body, model), **(body.chat_template_kwargs or {})}
    return msgspec.json.encode(told) if told else b""


def completion_job(body: protocol.CompletionRequest, model: ModelInfo) -> Job:
    """The job of a completion request."""
    check_model(body.model, model)
    _refuse_unsupported(body)
    if body.suffix is not None:
        raise _not_yet("suffix")
    max_tokens = body.max_tokens
    if max_tokens is None and model.defaults.max_tokens is None:
        max_tokens = min(DEFAULT_COMPLETION_TOKENS, model.max_model_len - 1)
    return _job(body, prompts_of(body.prompt), max_tokens, body.logprobs, model, {}, bool(body.echo))


def chat_prompt(
    messages: list[protocol.Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    tools: bytes = b"",
    template_kwargs: bytes = b"",
) -> ChatPrompt:
    """The prompt of a chat's messages; `tools` and `template_kwargs` are JSON."""
    return ChatPrompt(
        messages=tuple(_chat_message(index, message) for index, message in enumerate(messages)),
        add_generation_prompt=_given(add_generation_prompt, not continue_final_message),
        continue_final_message=bool(continue_final_message),
        tools=tools,
        template_kwargs=template_kwargs,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _not_yet(name: str) -> ApiError:
    return ApiError(400, f"{name} is not supported yet", param=name)


def check_model(name: str, model: ModelInfo) -> None:
    """404 for a model that is not served."""
    if name not in model.names:
        raise ApiError(
            404,
            f"the model {name[:200]!r} is not served here; served: {', '.join(model.names)}",
            param="model",
            code="model_not_found",
        )


def _refuse_unsupported(body: protocol.SamplingFields) -> None:
    if body.best_of is not None:
        raise ApiError(400, "best_of is not supported: ask for n choices and pick one", param="best_of")
    if body.early_stopping is not None:
        raise ApiError(400, "early_stopping belongs to beam search, which is not supported", param="early_stopping")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def _chat_message(index: int, message: protocol.Message) -> ChatMessage:
    where = f"messages[{index}]"
    if message.function_call:
        raise ApiError(
            400, f"{where}.function_call is deprecated: use tool_calls instead", param=f"{where}.function_call"
        )
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise ApiError(400, f"{where}.content is required for role {message.role}", param=f"{where}.content")
        content = ""
    elif not isinstance(content, str):
        if len(content) > MAX_PARTS:
            where = f"{where}.content"
            raise ApiError(400, f"{where} may have at most {MAX_PARTS} parts, not {len(content)}", param=where)
        content = "".join(_part_text(f"{where}.content[{at}]", part, message.role) for at, part in enumerate(content))
    if message.refusal is not None:
        if message.role != "assistant":
            raise ApiError(400, f"{where}.refusal is for role assistant only", param=f"{where}.refusal")
        content += message.refusal
    return ChatMessage(
        _ROLES.get(message.role, message.role),
        content,
        message.name,
        tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()),
        message.tool_call_id,
        message.reasoning_content or message.reasoning or "",
    )


def _part_text(where: str, part: protocol.ContentPart, role: protocol.Role) -> str:
    if part.type == "refusal" and role == "assistant":
        if part.refusal is None:
            raise ApiError(400, f"{where}.refusal is required", param=f"{where}.refusal")
        return part.refusal
    if part.type != "text":
        raise ApiError(400, f"{where}: only parts of type text are supported, not {part.type[:64]!r}", param=where)
    if part.text is None:
        raise ApiError(400, f"{where}.text is required", param=f"{where}.text")
    return part.text


def prompts_of(given: str | list[str | int | list[int]], param: str = "prompt") -> tuple[TextPrompt | TokenPrompt, ...]:
    """A text, several, a list of token ids, or several of those; `param` is the field that they came in."""
    if isinstance(given, str):
        return (TextPrompt(given),)
    if not given:
        raise ApiError(400, f"{param} must not be empty", param=param)
    if all(isinstance(item, int) for item in given):
        return (_token_prompt(given, param),)  # type: ignore[arg-type]
    if len(given) > MAX_PROMPTS:
        raise ApiError(400, f"{param} may have at most {MAX_PROMPTS} entries, not {len(given)}", param=param)
    if all(isinstance(item, str) for item in given):
        return tuple(TextPrompt(text) for text in given)  # type: ignore[arg-type]
    if all(isinstance(item, list) for item in given):
        return tuple(_token_prompt(ids, param) for ids in given)  # type: ignore[arg-type]
    raise ApiError(400, f"{param} must be a string, strings, token ids or lists of token ids, not a mix", param=param)


def prompt_names(index: int, count: int) -> dict[str, str]:
    """What the prompt is called in errors: by its index where there are several."""
    return {"prompt": f"prompt[{index}]"} if count > 1 else {}


def _token_prompt(ids: Sequence[int], param: str) -> TokenPrompt:
    try:
        return TokenPrompt(pack_ints(ids))
    except OverflowError:
        raise ApiError(400, f"{param}: a token id does not fit 32 bits", param=param) from None


def _scored(asked: int | None, echoed: int | None, echo_only: bool) -> int | None:
    """Alternatives for each prompt token; None: its log-probabilities are not wanted.

    A request that only echoes its prompt is one for its log-probabilities: else there would be nothing to compute.
    """
    wanted = [count for count in (asked, echoed, 0 if echo_only else None) if count is not None]
    return max(wanted, default=None)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    bias = bias or {}
    if not all(key.isascii() and key.isdigit() for key in bias):
        raise ApiError(400, "logit_bias: the keys must be token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _job(
    body: protocol.SamplingFields,
    prompts: tuple[TextPrompt | ChatPrompt | TokenPrompt, ...],
    max_tokens: int | None,
    logprobs: int | None,
    model: ModelInfo,
    renamed: dict[str, str],
    echo: bool = False,
) -> Job:
    stop, defaults = body.stop, model.defaults
    grammar, grammar_name = grammar_of(body)
    renamed = {**renamed, "grammar": grammar_name}
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_given(body.min_tokens, 0),
        temperature=_given(body.temperature, defaults.temperature),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=0 if body.top_k == -1 else _given(body.top_k, defaults.top_k),
        min_p=_given(body.min_p, defaults.min_p),
        seed=body.seed,
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias),
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=_given(body.skip_special_tokens, True),
        logprobs=logprobs,
        n=_given(body.n, 1),
        stop_on_loop=body.stop_on_loop,
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        prompt_logprobs=_scored(body.prompt_logprobs, logprobs if echo else None, echo and max_tokens == 0),
        grammar=grammar,
    )
    options: RequestOptions = {
        "priority": _given(body.priority, 0),
        "ttft_target_ms": body.ttft_target_ms,
        "cache_pin_seconds": _given(body.cache_pin_seconds, 0.0),
    }
    # Of the output alone where that is said: the ids of a long prompt are much to send before the first token.
    return_prompt_token_ids = body.return_token_ids is True
    if echo or return_prompt_token_ids:
        options["return_prompt"] = True
    cache_salt = _given(body.cache_salt, "")
    try:
        validate_options(**options)
        check_characters("cache_salt", cache_salt, MAX_SALT)
        validate_params(params, model)
    except InvalidRequest as error:
        raise ApiError.of_invalid(error).renamed(renamed) from None
    for index, prompt in enumerate(prompts):
        try:
            validate_prompt(prompt, params, model)
        except InvalidRequest as error:
            raise ApiError.of_invalid(error).renamed({**renamed, **prompt_names(index, len(prompts))}) from None
    return Job(
        prompts,
        params,
        body.model,
        bool(body.stream),
        bool(body.stream_options and body.stream_options.include_usage),
        echo,
        bool(body.return_token_ids),
        return_prompt_token_ids,
        options,
        cache_salt,
        body.prompt_logprobs,
        renamed,
    )
