"""Bodies that do not fit their type: every enum and every number of every request tells what is allowed there."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect

from frontend.body import decode_body
from frontend.errors import ApiError
from frontend.protocol import ChatRequest
from frontend.responses_api.protocol import ResponsesRequest
from frontend.routes import ROUTES
from frontend.tokenize import TokenizeRequest
from frontend.translation import Names, chat_request

KINDS = list(dict.fromkeys(route.body for route in ROUTES if route.body is not None))
TOO_LARGE = "#"  # stands for a number that JSON can say and no parameter can be
UNBOUNDED = {"dimensions", "best_of"}  # refused, whatever they are


class Leaf(NamedTuple):
    """A literal or a number somewhere in a request; `body` is a request with the value there."""

    path: str
    info: inspect.Type
    body: Callable[[Any], Any]


def smallest(info: inspect.Type) -> Any:
    """A value that fits."""
    if isinstance(info, inspect.StructType):
        return {field.encode_name: smallest(field.type) for field in info.fields if field.required}
    if isinstance(info, inspect.UnionType):
        return smallest(info.types[0])
    if isinstance(info, inspect.LiteralType):
        return info.values[0]
    return {inspect.StrType: "x", inspect.IntType: 1, inspect.ListType: []}[type(info)]


def leaves(info: inspect.Type) -> Iterator[Leaf]:
    """All of a type, found without the JSON Schema that the messages are made from."""
    if isinstance(info, inspect.LiteralType | inspect.IntType | inspect.FloatType):
        yield Leaf("", info, lambda value: value)
    elif isinstance(info, inspect.UnionType):
        for item in info.types:
            yield from leaves(item)
    elif isinstance(info, inspect.ListType):
        for path, leaf, body in leaves(info.item_type):
            yield Leaf(f"[0]{path}", leaf, lambda value, body=body: [body(value)])
    elif isinstance(info, inspect.DictType):
        for _, leaf, body in leaves(info.value_type):
            yield Leaf("", leaf, lambda value, body=body: {"1": body(value)})
    elif isinstance(info, inspect.StructType):
        whole = smallest(info)
        for field in info.fields:
            name = field.encode_name
            for path, leaf, body in leaves(field.type):
                yield Leaf(f".{name}{path}", leaf, lambda value, name=name, body=body: {**whole, name: body(value)})


ALL = [(kind, leaf) for kind in KINDS for leaf in leaves(inspect.type_info(kind))]
LITERALS = [(kind, leaf) for kind, leaf in ALL if isinstance(leaf.info, inspect.LiteralType)]
NUMBERS = [(kind, leaf) for kind, leaf in ALL if not isinstance(leaf.info, inspect.LiteralType)]


def name_of(value: Any) -> str:
    return value.path if isinstance(value, Leaf) else value.__name__


def refused(body: bytes, kind: type) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_body(body, msgspec.json.Decoder(kind))
    assert caught.value.status == 400
    return caught.value


def test_the_walk_finds_what_there_is() -> None:
    assert {leaf.path for kind, leaf in LITERALS if kind is ChatRequest} == {
        ".messages[0].role",
        ".messages[0].tool_calls[0].type",
        ".return_token_ids",
        ".tool_choice.allowed_tools.mode",
    }
    assert set(KINDS) - {kind for kind, leaf in NUMBERS} == {TokenizeRequest}
    for kind, leaf in LITERALS:
        assert isinstance(leaf.info, inspect.LiteralType)
        for value in leaf.info.values:
            decode_body(json.dumps(leaf.body(value)).encode(), msgspec.json.Decoder(kind))


@pytest.mark.parametrize("given", ["robot", "", "x" * 100_000, "it's - at `$.model`", 5, True, [], 1.5])
@pytest.mark.parametrize(("kind", "leaf"), LITERALS, ids=name_of)
def test_every_enum_tells_its_values(kind: type, leaf: Leaf, given: Any) -> None:
    if leaf.path == ".return_token_ids" and given is True:  # a word, or a boolean
        decode_body(json.dumps(leaf.body(given)).encode(), msgspec.json.Decoder(kind))
        return
    error = refused(json.dumps(leaf.body(given)).encode(), kind)
    assert error.body.param == leaf.path[1:]
    assert error.body.message.startswith(f"{leaf.path[1:]} must be ")
    assert isinstance(leaf.info, inspect.LiteralType)
    assert all(str(value) in error.body.message for value in leaf.info.values)
    assert not isinstance(given, str) or repr(given[:64]) in error.body.message
    assert len(error.body.message) < 300


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 10_000])
@pytest.mark.parametrize(("kind", "leaf"), NUMBERS, ids=name_of)
def test_every_number_tells_its_bounds(kind: type, leaf: Leaf, number: str) -> None:
    body = json.dumps(leaf.body(TOO_LARGE)).replace(f'"{TOO_LARGE}"', number)
    error = refused(body.encode(), kind)
    assert error.body.param == leaf.path[1:]
    bounds = "the number is too large" if leaf.path[1:] in UNBOUNDED else "must be (between|above) -?[0-9.]+ and "
    assert "$" not in error.body.message
    assert re.search(bounds, error.body.message)


CHAT = '"model":"m","messages":[]'


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (ChatRequest, f'{{{CHAT},"temperature":1e999}}', "temperature must be between 0 and 2"),
        (ChatRequest, f'{{{CHAT},"top_p":1e999}}', "top_p must be above 0 and at most 1"),
        (ChatRequest, f'{{{CHAT},"n":1e999}}', "n must be between 1 and 16"),
        (
            ChatRequest,
            f'{{{CHAT},"seed":1{"0" * 9999}}}',
            "seed must be between -9223372036854775808 and 9223372036854775807",
        ),
        (
            ChatRequest,
            f'{{{CHAT},"logit_bias":{{"1":1e999}}}}',
            "logit_bias: one of its values must be between -100 and 100",
        ),
        (
            ChatRequest,
            f'{{{CHAT},"logit_bias":{{"{"1" * 21}":1}}}}',
            "logit_bias: one of its keys: Expected `str` of length <= 20",
        ),
        (
            ChatRequest,
            f'{{{CHAT},"chat_template_kwargs":{{"a":[{{"b":1e999}}]}}}}',
            "chat_template_kwargs: one of its values: the number is too large",
        ),
        (
            ChatRequest,
            '{"model":"m","messages":[{"role":"user","tool_calls":[{"type":"x"}]}]}',
            "messages[0].tool_calls[0].type must be function, not 'x'",
        ),
        (ChatRequest, f'{{{CHAT},"stop":[1]}}', "stop[0]: Expected `str`, got `int`"),
        (ChatRequest, "[]", "the body must be a JSON object: Expected `object`, got `array`"),
    ],
)
def test_messages(kind: type, body: str, message: str) -> None:
    """Bounds are OpenAI's, but for `n`'s."""
    assert refused(body.encode(), kind).body.message == message


def test_where_a_string_may_be_an_object_too_that_is_told() -> None:
    error = refused(b'{"model":"m","input":"a","tool_choice":"sometimes"}', ResponsesRequest)
    assert error.body.message == "tool_choice must be one of auto, none, required, an object, not 'sometimes'"


def test_a_translated_request_tells_the_clients_name() -> None:
    with pytest.raises(ApiError) as caught:
        chat_request({"model": "m", "messages": [{"role": "robot"}]}, Names({"messages": "input"}))
    assert caught.value.body.param == "input[0].role"
    assert caught.value.body.message.startswith("input[0].role must be one of assistant, ")
