"""Bounds of what a client may ask for, the same over HTTP and over ZeroMQ.

The limits are OpenAI's where OpenAI has one. A prompt and its `max_tokens` must fit the context together
(`prompt tokens + max_tokens <= max_model_len`); for text and chat prompts, whose length is known only after encoding,
the tokenizer process checks that.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec

from .codec import unpack_ints
from .messages import (
    ChatMessage,
    ChatPrompt,
    Detokenize,
    Generate,
    Grammar,
    GrammarKind,
    ModelInfo,
    Pooling,
    SamplingParams,
    TextPrompt,
    Tokenize,
    TokenPrompt,
)

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 200_000  # of one request: prompt tokens times choices times alternatives and the token itself
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it, and must stay finite
MAX_REPETITION_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_LOOP_REPEATS = 1000
MAX_PRIORITY = 1_000_000
MIN_TTFT_TARGET_MS = 1.0
MAX_TTFT_TARGET_MS = 3_600_000.0
MAX_PIN_SECONDS = 3600.0
MIN_DEADLINE = 0.001  # seconds
MAX_DEADLINE = 86400.0
MAX_GRAMMAR_BYTES = 128 << 10
MAX_GRAMMAR_DEPTH = 64  # of nested arrays and objects in a JSON schema
MAX_GRAMMAR_CHOICES = 1024
MAX_TOKENIZE_BYTES = 1 << 20
MAX_DETOKENIZE = 1 << 18  # token ids
MAX_NAME = 128  # characters of a namespace, a tenant, an external id, an idempotency key or a message's name
MAX_PROMPT_BYTES = 16 << 20  # of a text prompt, or of all texts of a chat; far more than a context holds
MAX_MESSAGES = 4096
MAX_SHOWN_SPECIAL_TOKENS = 16
MAX_TOOLS = 128
MAX_TOOL_BYTES = 64 << 10  # of one tool, as JSON
MAX_ALL_TOOLS_BYTES = 512 << 10  # of all tools together
MAX_TOOL_CALLS = 128  # of one message
MAX_TOOL_CALL_ID = 256  # characters
MAX_TEMPLATE_KWARGS_BYTES = 16 << 10  # as JSON
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
POOLINGS = tuple(filter(None, get_args(Pooling)))
ROLES = ("system", "developer", "user", "assistant", "tool")

_INT64 = 1 << 63


class InvalidRequest(ValueError):
    """A request that breaks a bound: `message` says which, `param` names the field, `code` is set where one exists."""

    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def validate(prompt: TextPrompt | ChatPrompt | TokenPrompt, params: SamplingParams, model: ModelInfo) -> None:
    """Raise `InvalidRequest` for the first field that is out of bounds for this model."""
    validate_params(params, model)
    validate_prompt(prompt, params, model)


def validate_prompt(prompt: TextPrompt | ChatPrompt | TokenPrompt, params: SamplingParams, model: ModelInfo) -> None:
    """Raise `InvalidRequest` for a prompt that this model cannot take, with valid `params`."""
    if isinstance(prompt, TextPrompt):
        _check_prompt_size("prompt", _check_text("prompt", prompt.text))
        if not prompt.text:
            raise InvalidRequest("prompt must not be empty", "prompt")
    elif isinstance(prompt, TokenPrompt):
        _check_token_prompt(prompt, params, model)
    else:
        _check_chat(prompt, model)


def validate_together(
    tokens: Sequence[int], n: int, model: ModelInfo, name: str, prompt_logprobs: int | None = None
) -> None:
    """Raise `InvalidRequest`, naming `name`, for prompts of one request that even an idle engine would not queue.

    tokens: least number of tokens of each prompt. Each has `n` choices, which wait one by one until they start; the
    tokenizer process has the same rule for the choices of one prompt, whose length it knows. Likewise for what
    `prompt_logprobs` would list of all of them.
    """
    check_listed(sum(tokens), n, prompt_logprobs)
    choices = len(tokens) * n
    if choices > model.max_queue_requests:
        raise InvalidRequest(
            f"{name}: {len(tokens)} prompts with n = {n} are {choices} choices, but at most {model.max_queue_requests} "
            "can wait at once (--max-queue-requests)",
            name,
        )
    waiting = sum(tokens) * n - min(tokens, default=0)  # whichever of them starts first
    if waiting > model.max_queue_tokens:
        raise InvalidRequest(
            f"{name}: while one of these {choices} choices starts, the others wait with {waiting} prompt tokens, but "
            f"at most {model.max_queue_tokens} can (--max-queue-tokens)",
            name,
        )


def check_listed(prompt_tokens: int, n: int, prompt_logprobs: int | None) -> None:
    """Raise `InvalidRequest` when more log-probabilities of prompt tokens are asked for than one answer may hold."""
    if prompt_logprobs is None:
        return
    listed = prompt_tokens * n * (prompt_logprobs + 1)
    if listed > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs (or logprobs with echo) is {prompt_logprobs}: {prompt_logprobs + 1} values for each of "
            f"{prompt_tokens} prompt tokens and {n} choices are {listed} values, but at most {MAX_PROMPT_LOGPROBS} can "
            "be listed",
            "prompt_logprobs",
        )


def validate_params(params: SamplingParams, model: ModelInfo) -> None:
    """Raise `InvalidRequest` for the first sampling parameter that is out of bounds for this model."""
    _check_float("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _check_float("top_p", params.top_p, 0.0, 1.0, above=True)
    _check_float("min_p", params.min_p, 0.0, 1.0)
    _check_float("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_float("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_float("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_int("top_k", params.top_k, -1, model.vocab_size)
    _check_int("n", params.n, 1, MAX_CHOICES)
    if params.seed is not None:
        _check_int("seed", params.seed, -_INT64, _INT64 - 1)
    if params.logprobs is not None:
        _check_int("logprobs", params.logprobs, 0, min(MAX_LOGPROBS, model.vocab_size))
    if params.prompt_logprobs is not None:
        _check_int("prompt_logprobs", params.prompt_logprobs, 0, min(MAX_LOGPROBS, model.vocab_size))
    if params.stop_on_loop is not None:
        _check_loop(params.stop_on_loop)
    if len(params.shown_special_tokens) > MAX_SHOWN_SPECIAL_TOKENS:
        raise InvalidRequest(
            f"shown_special_tokens may have at most {MAX_SHOWN_SPECIAL_TOKENS} entries", "shown_special_tokens"
        )
    for token in params.shown_special_tokens:
        check_characters("shown_special_tokens", token, MAX_NAME)
    _check_lengths(params, model)
    _check_stops(params, model)
    _check_bias(params, model)
    _check_words(params, model)
    if params.grammar is not None:
        _check_grammar(params.grammar)


def validate_options(
    *,
    external_id: str = "",
    priority: int = 0,
    ttft_target_ms: float | None = None,
    cache_pin_seconds: float = 0.0,
    namespace: str = "",
    tenant: str = "",
    return_prompt: bool = False,
    deadline: float | None = None,
    idempotency_key: str = "",
) -> None:
    """Raise `InvalidRequest` for the first field out of bounds, of those that are neither prompt nor sampling."""
    check_characters("external_id", external_id, MAX_NAME)
    _check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    if ttft_target_ms is not None:
        _check_float("ttft_target_ms", ttft_target_ms, MIN_TTFT_TARGET_MS, MAX_TTFT_TARGET_MS)
    _check_float("cache_pin_seconds", cache_pin_seconds, 0.0, MAX_PIN_SECONDS)
    check_characters("namespace", namespace, MAX_NAME)
    check_characters("tenant", tenant, MAX_NAME)
    if not isinstance(return_prompt, bool):
        raise InvalidRequest("return_prompt must be true or false", "return_prompt")
    if deadline is not None:
        _check_float("deadline", deadline, MIN_DEADLINE, MAX_DEADLINE)
    check_characters("idempotency_key", idempotency_key, MAX_NAME)


def validate_generate(request: Generate, model: ModelInfo) -> None:
    """Raise `InvalidRequest` for the first field of a whole request that is out of bounds for this model."""
    validate_options(
        external_id=request.external_id,
        priority=request.priority,
        ttft_target_ms=request.ttft_target_ms,
        cache_pin_seconds=request.cache_pin_seconds,
        namespace=request.namespace,
        tenant=request.tenant,
        return_prompt=request.return_prompt,
        deadline=request.deadline,
        idempotency_key=request.idempotency_key,
    )
    validate(request.prompt, request.params, model)
    if request.pooling:
        check_pooling(request.pooling, request.params)


def check_pooling(pooling: str, params: SamplingParams) -> None:
    """Raise `InvalidRequest` unless this is a way to make an embedding, and one is asked for."""
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be one of {', '.join(POOLINGS)}", "pooling")
    if params.max_tokens != 1 or params.n != 1:
        raise InvalidRequest("with pooling, max_tokens and n must be 1: the answer is one embedding", "pooling")


def validate_tokenize(request: Tokenize, model: ModelInfo) -> None:
    """Raise `InvalidRequest` for a prompt that cannot be tokenized; it may be empty, or longer than the context."""
    if isinstance(request.prompt, TextPrompt):
        size = _check_text("prompt", request.prompt.text)
    else:
        _check_chat(request.prompt, model)
        messages = request.prompt.messages
        texts = [message.content for message in messages]
        texts += [call.arguments for message in messages for call in message.tool_calls]
        size = sum(len(text.encode()) for text in texts)
    if size > MAX_TOKENIZE_BYTES:
        name = "prompt" if isinstance(request.prompt, TextPrompt) else "messages"
        raise InvalidRequest(f"{name} may have at most {MAX_TOKENIZE_BYTES} bytes of text, not {size}", name)


def validate_detokenize(request: Detokenize, model: ModelInfo) -> None:
    """Raise `InvalidRequest` for token ids that the model does not have, or too many."""
    try:
        ids = unpack_ints(request.token_ids)
    except ValueError:
        raise InvalidRequest("tokens: token ids must be 4-byte integers", "tokens") from None
    if len(ids) > MAX_DETOKENIZE:
        raise InvalidRequest(f"tokens may have at most {MAX_DETOKENIZE} entries, not {len(ids)}", "tokens")
    _check_ids("tokens", ids, model.vocab_size)


def check_characters(name: str, value: str, most: int) -> None:
    """Raise `InvalidRequest` when `value` is no text of at most `most` characters."""
    _check_text(name, value)
    if len(value) > most:
        raise InvalidRequest(f"{name} may have at most {most} characters, not {len(value)}", name)


def _check_float(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number", name)
    if not math.isfinite(value) or value < low or value > high or (above and value <= low):
        bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:.7g}"
        raise InvalidRequest(f"{name} must be {bounds}", name)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}", name)


def _check_loop(repeats: int) -> None:
    """A sequence that stands once repeats nothing, so 1 is no number of repeats."""
    _check_int("stop_on_loop", repeats, 0, MAX_LOOP_REPEATS)
    if repeats == 1:
        raise InvalidRequest(f"stop_on_loop must be 0 (off) or between 2 and {MAX_LOOP_REPEATS}", "stop_on_loop")


def _check_prompt_size(name: str, size: int) -> None:
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"{name} may have at most {MAX_PROMPT_BYTES} bytes of text, not {size}", name)


def _check_text(name: str, value: str) -> int:
    """Size of `value` in UTF-8 bytes."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string", name)
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds an unpaired surrogate, which is not text", name) from None


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}: {_short(token_id)} is not a token id between 0 and {vocab_size - 1}", name)


def _short(value: object) -> str:
    try:
        text = str(value)
    except ValueError:  # an integer of thousands of digits
        return "the value"
    return text if len(text) <= 32 else text[:32] + "..."


def _check_lengths(params: SamplingParams, model: ModelInfo) -> None:
    if params.max_tokens is not None:
        least = 1 if params.prompt_logprobs is None else 0  # without an output there must be something to tell
        _check_int("max_tokens", params.max_tokens, least, _INT64 - 1)
        if params.max_tokens >= model.max_model_len:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens}, but prompt and output together may have at most "
                f"{model.max_model_len} tokens",
                "max_tokens",
                "context_length_exceeded",
            )
    most = model.max_model_len - 1 if params.max_tokens is None else params.max_tokens
    _check_int("min_tokens", params.min_tokens, 0, _INT64 - 1)
    if params.min_tokens > most:
        what = "what the context allows" if params.max_tokens is None else "max_tokens"
        raise InvalidRequest(f"min_tokens is {params.min_tokens}, more than {what} ({most})", "min_tokens")


def _check_stops(params: SamplingParams, model: ModelInfo) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may have at most {MAX_STOP_STRINGS} strings, not {len(params.stop)}", "stop")
    for stop in params.stop:
        size = _check_text("stop", stop)
        if not 1 <= size <= MAX_STOP_BYTES:
            raise InvalidRequest(f"each stop string must have 1 to {MAX_STOP_BYTES} bytes, not {size}", "stop")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"stop_token_ids may have at most {MAX_STOP_TOKENS} entries", "stop_token_ids")
    _check_ids("stop_token_ids", params.stop_token_ids, model.vocab_size)


def _check_bias(params: SamplingParams, model: ModelInfo) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias may have at most {MAX_LOGIT_BIAS} entries", "logit_bias")
    _check_ids("logit_bias", params.logit_bias, model.vocab_size)
    for value in params.logit_bias.values():
        _check_float("logit_bias", value, -MAX_BIAS, MAX_BIAS)


def _check_words(params: SamplingParams, model: ModelInfo) -> None:
    if len(params.allowed_token_ids) > model.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids may have at most {model.vocab_size} entries, as many as the vocabulary",
            "allowed_token_ids",
        )
    _check_ids("allowed_token_ids", params.allowed_token_ids, model.vocab_size)
    if params.allowed_token_ids and params.grammar is not None:
        raise InvalidRequest("allowed_token_ids and structured output exclude each other", "allowed_token_ids")
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words may have at most {MAX_BAD_WORDS} strings, not {len(params.bad_words)}", "bad_words"
        )
    for word in params.bad_words:
        size = _check_text("bad_words", word)
        if not word.strip() or size > MAX_BAD_WORD_BYTES:
            raise InvalidRequest(
                f"each of bad_words must have 1 to {MAX_BAD_WORD_BYTES} bytes, not only spaces", "bad_words"
            )


def _check_grammar(grammar: Grammar) -> None:
    """Its size and, where the source is JSON, its form; whether it can be compiled turns out in the tokenizer."""
    if not isinstance(grammar, Grammar) or grammar.kind not in get_args(GrammarKind):
        raise InvalidRequest(f"grammar: its kind must be one of {', '.join(get_args(GrammarKind))}", "grammar")
    size = _check_text("grammar", grammar.source)
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"grammar: it may have at most {MAX_GRAMMAR_BYTES} bytes, not {size}", "grammar")
    if len(grammar.origins) > MAX_TOOLS:
        raise InvalidRequest(f"grammar: origins may have at most {MAX_TOOLS} entries", "grammar")
    for name in grammar.origins.values():
        check_characters("grammar", name, MAX_NAME)
    if grammar.kind == "json_schema":
        _check_schema(grammar.source)
    elif grammar.kind == "choice":
        _check_choices(grammar.source)
    elif (grammar.kind == "json_object") != (not grammar.source):
        raise InvalidRequest("grammar: it must not be empty, except for json_object", "grammar")


def _check_schema(source: str) -> None:
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"grammar: the schema is not valid JSON: {error}", "grammar") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("grammar: a JSON schema must be an object or a boolean", "grammar")
    level: list[Any] = [schema]
    for _ in range(MAX_GRAMMAR_DEPTH):
        level = [
            value
            for node in level
            if isinstance(node, dict | list)
            for value in (node.values() if isinstance(node, dict) else node)
        ]
    if any(isinstance(node, dict | list) for node in level):
        raise InvalidRequest(f"grammar: the schema nests deeper than {MAX_GRAMMAR_DEPTH} levels", "grammar")


def _check_choices(source: str) -> None:
    try:
        choices = msgspec.json.decode(source, type=list[str])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest("grammar: the choices must be a list of strings", "grammar") from None
    if not 1 <= len(choices) <= MAX_GRAMMAR_CHOICES:
        raise InvalidRequest(
            f"grammar: there must be 1 to {MAX_GRAMMAR_CHOICES} choices, not {len(choices)}", "grammar"
        )
    if not all(choices):
        raise InvalidRequest("grammar: a choice must not be empty", "grammar")


def _check_token_prompt(prompt: TokenPrompt, params: SamplingParams, model: ModelInfo) -> None:
    try:
        ids = unpack_ints(prompt.token_ids)
    except ValueError:
        raise InvalidRequest("prompt: token ids must be 4-byte integers", "prompt") from None
    if not ids:
        raise InvalidRequest("prompt must not be empty", "prompt")
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        _check_ids("prompt", ids, model.vocab_size)
    if len(ids) >= model.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens, but prompt and output together may have at most "
            f"{model.max_model_len} tokens",
            "prompt",
            "context_length_exceeded",
        )
    if params.max_tokens is not None and len(ids) + params.max_tokens > model.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}, but prompt and output together "
            f"may have at most {model.max_model_len} tokens",
            "max_tokens",
            "context_length_exceeded",
        )


def _check_chat(prompt: ChatPrompt, model: ModelInfo) -> None:
    if not model.has_chat_template:
        raise InvalidRequest("this model has no chat template: use a plain prompt (/v1/completions)", "messages")
    if not prompt.messages:
        raise InvalidRequest("messages must not be empty", "messages")
    if len(prompt.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages may have at most {MAX_MESSAGES} entries", "messages")
    size = 0
    for index, message in enumerate(prompt.messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
        size += _check_text(f"{where}.content", message.content)
        if message.name is not None:
            check_characters(f"{where}.name", message.name, MAX_NAME)
        size += _check_text(f"{where}.reasoning", message.reasoning)
        size += _check_calls(where, message)
    _check_prompt_size("messages", size)
    _check_tools(prompt.tools)
    _check_template_kwargs(prompt.template_kwargs, model)
    if prompt.continue_final_message:
        if prompt.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        if prompt.messages[-1].role != "assistant":
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant", "continue_final_message"
            )
        if prompt.messages[-1].tool_calls:
            raise InvalidRequest(
                "continue_final_message: the last message has tool_calls, behind which its text cannot go on: leave "
                "out one of the two",
                "continue_final_message",
            )


def _check_calls(where: str, message: ChatMessage) -> int:
    """The calls of an assistant's turn, or what a tool's turn answers; the bytes of their arguments."""
    size = 0
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls is for role assistant only", f"{where}.tool_calls")
    if len(message.tool_calls) > MAX_TOOL_CALLS:
        raise InvalidRequest(f"{where}.tool_calls may have at most {MAX_TOOL_CALLS} calls", f"{where}.tool_calls")
    for at, call in enumerate(message.tool_calls):
        place = f"{where}.tool_calls[{at}]"
        check_characters(f"{place}.id", call.id, MAX_TOOL_CALL_ID)
        _check_tool_name(f"{place}.function.name", call.name)
        size += _check_text(f"{place}.function.arguments", call.arguments)
    if message.tool_call_id is not None:
        if message.role != "tool":
            raise InvalidRequest(f"{where}.tool_call_id is for role tool only", f"{where}.tool_call_id")
        check_characters(f"{where}.tool_call_id", message.tool_call_id, MAX_TOOL_CALL_ID)
    return size


def _check_tool_name(where: str, name: object) -> None:
    if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
        raise InvalidRequest(f"{where} must have 1 to 64 of the characters a-z, A-Z, 0-9, _ and -", where)


def _check_tools(data: bytes) -> None:
    """OpenAI's list of function tools, as JSON."""
    if not data:
        return
    if len(data) > MAX_ALL_TOOLS_BYTES:
        raise InvalidRequest(f"tools may have at most {MAX_ALL_TOOLS_BYTES} bytes as JSON, not {len(data)}", "tools")
    try:
        tools = msgspec.json.decode(data, type=list[dict[str, msgspec.Raw]])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest("tools must be a JSON list of objects", "tools") from None
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidRequest(f"tools must have 1 to {MAX_TOOLS} entries, not {len(tools)}", "tools")
    names: set[str] = set()
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        function = _function_of(where, tool)
        size = sum(len(value) for value in function.values())
        if size > MAX_TOOL_BYTES:
            raise InvalidRequest(f"{where} may have at most {MAX_TOOL_BYTES} bytes as JSON, not {size}", where)
        name = _decoded(function.get("name"))
        _check_tool_name(f"{where}.function.name", name)
        if name in names:
            raise InvalidRequest(f"{where}.function.name: there is another tool of this name", f"{where}.function.name")
        names.add(str(name))
        parameters = _decoded(function.get("parameters"))
        # The arguments of a call are an object, so that is what the schema must be of.
        if parameters is not None and (
            not isinstance(parameters, dict) or parameters.get("type", "object") != "object"
        ):
            place = f"{where}.function.parameters"
            raise InvalidRequest(f"{place} must be a JSON schema of type object", place)


def _function_of(where: str, tool: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    if _decoded(tool.get("type")) != "function":
        raise InvalidRequest(f"{where}.type must be function: other tools are not supported", f"{where}.type")
    try:
        return msgspec.json.decode(tool.get("function", b""), type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        raise InvalidRequest(f"{where}.function must be an object", f"{where}.function") from None


def _decoded(value: msgspec.Raw | None) -> object:
    return None if value is None else msgspec.json.decode(value)


def _check_template_kwargs(data: bytes, model: ModelInfo) -> None:
    """The JSON object of further names that the chat template sees."""
    if not data:
        return
    name = "chat_template_kwargs"
    if len(data) > MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequest(f"{name} may have at most {MAX_TEMPLATE_KWARGS_BYTES} bytes as JSON", name)
    try:
        given = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"{name} must be a JSON object", name) from None
    for key in given:
        if key not in model.template_kwargs:
            allowed = ", ".join(model.template_kwargs) or "none"
            raise InvalidRequest(
                f"{name}.{_short(key)} is not allowed here; allowed: {allowed} (--chat-template-kwargs)",
                f"{name}.{_short(key)}",
            )
