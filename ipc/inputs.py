"""What callers of the client SDK may pass, as the engine's messages."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import msgspec

from .codec import encode, pack_ints
from .engine_client import Prompt, RequestOptions
from .errors import bad_request
from .messages import ChatMessage, ChatPrompt, Grammar, SamplingParams, TextPrompt, TokenPrompt, ToolCall

S = TypeVar("S", bound=msgspec.Struct)
Message = ChatMessage | Mapping[str, Any]  # such as {"role": "user", "content": "Hello"}
PromptLike = str | Sequence[int] | Sequence[Message] | Prompt
"""A text, token ids, or the messages of a chat; `ChatPrompt` has more to say of one."""


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | None
    n: int
    stop_on_loop: int | None
    grammar: Grammar | None
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    prompt_logprobs: int | None
    shown_special_tokens: Sequence[str]


class CallOptions(RequestOptions, total=False):
    """What a call may say besides its prompt and how to sample.

    `deadline`: seconds after which the call fails with `DeadlineExceeded`, all its attempts together; None: no limit.
    `retries`: how often it is sent again, at most, when that is safe. `idempotency_key`: without one, a call that may
    be sent again gets a key of its own.
    """

    retries: int


class GenerateOptions(SamplingOptions, CallOptions, total=False):
    """All keywords of a generation."""


_SAMPLING_FIELDS = tuple(field.name for field in msgspec.structs.fields(SamplingParams))
_MESSAGE_FIELDS = frozenset(field.name for field in msgspec.structs.fields(ChatMessage))
_CALL_FIELDS = frozenset(CallOptions.__annotations__)
_PLACE = re.compile(r" - at .*")
_NO_PROMPT = "prompt must be a text, a list of token ids or a list of messages"


def split_options(options: GenerateOptions) -> tuple[dict[str, Any], CallOptions]:
    """The keywords of `SamplingParams`, and the others."""
    sampling: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in options.items():
        (sampling if name in _SAMPLING_FIELDS else others)[name] = value
    return sampling, check_keywords(others)


def check_keywords(options: Mapping[str, Any]) -> CallOptions:
    """The same; TypeError for what is none of `CallOptions`."""
    unknown = sorted(options.keys() - _CALL_FIELDS)
    if unknown:
        raise TypeError(f"{unknown[0]!r} is no keyword of this call")
    return options  # type: ignore[return-value]


def as_params(params: SamplingParams | None, given: Mapping[str, Any]) -> SamplingParams:
    """`params` with what is given by name in its place; `BadRequest` names what has a wrong type."""
    named: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if isinstance(named.get("stop"), str):
        named["stop"] = (named["stop"],)
    if params is None:
        params = SamplingParams()
    elif not isinstance(params, SamplingParams):
        raise bad_request(0, "params must be SamplingParams; single settings are keywords, as max_tokens=20", "params")
    return _checked(msgspec.structs.replace(params, **named))


def as_token_ids(token_ids: object) -> bytes:
    """int32 of a list of token ids; `BadRequest` when it is none."""
    if isinstance(token_ids, str | bytes | bytearray | memoryview) or not isinstance(token_ids, Iterable):
        raise bad_request(0, "tokens must be a list of token ids", "tokens")
    return _packed("tokens", tuple(token_ids), "tokens must be a list of token ids")


def _packed(name: str, token_ids: Sequence[Any], otherwise: str) -> bytes:
    try:
        if bool in set(map(type, token_ids)):
            raise TypeError
        return pack_ints(token_ids)
    except TypeError:
        raise bad_request(0, otherwise, name) from None
    except OverflowError:
        raise bad_request(0, f"{name}: a token id does not fit 32 bits", name) from None


def _checked(given: S, where: str = "", name: str = "") -> S:
    """As the server would read it; `BadRequest` names the field that has a wrong type.

    `where`: what goes before the names of fields; `name` is for fields whose own says nothing to a caller.
    """
    read: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(given)):
        value = getattr(given, field.name)
        try:
            read[field.name] = msgspec.msgpack.decode(encode(value), type=field.type)
        except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
            named = name or where + field.name
            raise bad_request(0, f"{named}{_reason(error)}", named) from None
    return type(given)(**read)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return " holds an unpaired surrogate, which is not text"
    if isinstance(error, OverflowError):
        return ": an integer does not fit 64 bits"
    return f": {_PLACE.sub('', str(error))}"


def as_prompt(prompt: PromptLike) -> Prompt:
    """The prompt as a message; `BadRequest` when it is none."""
    made = _as_prompt(prompt)
    # The server would take the whole connection for broken because of one value of a wrong type.
    if not isinstance(made, ChatPrompt):
        return _checked(made, name="prompt")
    if isinstance(made.messages, list | tuple):
        for at, message in enumerate(made.messages):
            if isinstance(message, ChatMessage):
                _checked(message, f"messages[{at}].")
    return _checked(made)


def _as_prompt(prompt: PromptLike) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, TextPrompt | ChatPrompt | TokenPrompt):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise bad_request(0, _NO_PROMPT, "prompt")
    if prompt and isinstance(prompt[0], ChatMessage | Mapping):
        return ChatPrompt(tuple(_as_message(at, message) for at, message in enumerate(prompt)))
    return TokenPrompt(_packed("prompt", prompt, _NO_PROMPT))


def _as_message(at: int, message: object) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    where = f"messages[{at}]"
    if not isinstance(message, Mapping):
        raise bad_request(0, f"{where} must be an object with role and content", where)
    unknown = sorted(str(name) for name in message.keys() - _MESSAGE_FIELDS)
    if unknown:
        raise bad_request(0, f"{where}.{unknown[0]} is not known", f"{where}.{unknown[0]}")
    given = dict(message)
    if "role" not in given:
        raise bad_request(0, f"{where}.role is missing", f"{where}.role")
    calls = given.pop("tool_calls", None)
    if calls is None:
        calls = ()
    if not isinstance(calls, list | tuple):
        raise bad_request(0, f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    if given.get("content") is None:
        if given["role"] != "assistant":
            raise bad_request(0, f"{where}.content is required for role {given['role']}", f"{where}.content")
        given["content"] = ""
    return ChatMessage(
        **given, tool_calls=tuple(_as_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls))
    )


def _as_call(where: str, call: object) -> ToolCall:
    """A call as OpenAI writes it: {"id", "type": "function", "function": {"name", "arguments"}}."""
    if isinstance(call, ToolCall):
        return call
    try:
        function = call["function"]  # type: ignore[index]
        return ToolCall(call["id"], function["name"], function["arguments"])  # type: ignore[index]
    except (TypeError, KeyError):
        raise bad_request(0, f"{where} must have an id and a function with name and arguments", where) from None
