"""Other APIs' requests as chat requests, and errors about those in the words of what the client sent."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from .errors import ApiError
from .mismatch import invalid_body
from .protocol import BiasKey, ChatRequest, JsonSchema, StructuredOutputs
from .unknown import Ignored

T = TypeVar("T")

_FORMAT = re.compile(r"(?<![\w.])response_format(?:\.\w+)*")


def required(value: T | None, where: str) -> T:
    """`value`; `ApiError` when there is none."""
    if value is None:
        raise ApiError(400, f"{where} is required", param=where)
    return value


class ExtraFields(Struct, kw_only=True):
    """Fields of chat requests beyond OpenAI's that the other APIs take under the same names."""

    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_on_loop: int | None = None
    priority: int | None = None
    ttft_target_ms: float | None = None
    cache_pin_seconds: float | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logit_bias: dict[BiasKey, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Ignored = None

    def extra(self) -> dict[str, Any]:
        """Those that are given."""
        values = {name: getattr(self, name) for name in ExtraFields.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}


class Names:
    """Which of the client's parameters each parameter of the chat request came from."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names`: of a chat parameter, with all that is under it, to the client's."""
        self._names = dict(names)

    def add(self, chat: str, client: str) -> None:
        """One more parameter."""
        self._names[chat] = client

    def of(self, param: str) -> str:
        """The client's name of a chat parameter; the longest prefix that is known decides."""
        for end in sorted({len(param), *(found.start() for found in re.finditer(r"[.\[]", param))}, reverse=True):
            if (client := self._names.get(param[:end])) is not None:
                return client + self._rest(param[end:])
        return param

    def _rest(self, rest: str) -> str:
        return re.sub(r"\.function(?=\.|$)", "", rest).replace(
            ".parameters", self._names.get(".parameters", ".parameters")
        )

    def translate(self, error: ApiError) -> ApiError:
        """The same error with the client's name of the parameter, in the message too."""
        param = error.body.param
        if param is None:
            return error
        if (name := self.of(param)) == param:
            # It may speak of the client's own format besides.
            error.body.message = _FORMAT.sub(lambda found: self.of(found[0]), error.body.message)
            return error
        # "each stop string" speaks of strings, not of the parameter.
        pattern = r"(?<!each )(?<![\w.])" + re.escape(param) + r"(?!\w)"
        message = re.sub(pattern, lambda _: name, error.body.message, count=1)
        return ApiError(
            error.status,
            message,
            type=error.body.type,
            param=name,
            code=error.body.code,
            retry_after=error.retry_after,
        )


def chat_request(fields: dict[str, Any], names: Names) -> ChatRequest:
    """The chat request with these fields; null ones are left out. `ApiError` in the client's words."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(given, ChatRequest)
    except msgspec.ValidationError as error:
        raise names.translate(invalid_body(error, ChatRequest)) from None
