"""Bodies: depth, encoding, and names of what is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.body import MAX_DEPTH, check_depth, decode_body
from frontend.errors import ApiError
from frontend.protocol import chat_decoder, completion_decoder


def depth(value: Any) -> int:
    """Nesting of arrays and objects, counted by walking."""
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def is_too_deep(body: bytes) -> bool:
    try:
        check_depth(body)
    except ApiError:
        return True
    return False


@pytest.mark.parametrize("levels", [1, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 100_000])
@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_depth_limit_is_exact(levels: int, pair: str) -> None:
    opening = pair[0] if pair == "[]" else '{"a":'
    inner = "1" if pair == "{}" else ""
    body = opening * levels + inner + pair[1] * levels
    assert is_too_deep(body.encode()) == (levels > MAX_DEPTH)


def test_brackets_inside_strings_do_not_count() -> None:
    value = {"a": '[{"\\' * 200, "b": ["]" * 200, {"[[\\\\": "\\"}]}
    assert not is_too_deep(json.dumps(value).encode())


def test_many_shallow_brackets_are_no_depth() -> None:
    assert not is_too_deep(json.dumps([[1], {"a": []}] * 10_000).encode())


_leaves = st.none() | st.text(alphabet='[]{}"\\a,:', max_size=6)
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(_values, st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_depth_agrees_with_walking(value: Any, wraps: int) -> None:
    for _ in range(wraps):
        value = [value]
    assert is_too_deep(json.dumps(value).encode()) == (depth(value) > MAX_DEPTH)


@given(st.binary(max_size=300) | st.text(alphabet='[]{}"\\,:1', max_size=400).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_no_bytes_raise_anything_but_400(body: bytes) -> None:
    for decoder in (chat_decoder, completion_decoder):
        with pytest.raises(ApiError) as caught:  # the model is required, so none of these can be a request
            decode_body(body, decoder)
        assert caught.value.status == 400


CASES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"[]", None),
    (b"null", None),
    (b"{}", "model"),
    (b'{"model":"m"}', "messages"),
    (b'{"model":null,"messages":[]}', "model"),
    (b'{"model":"m","messages":{}}', "messages"),
    (b'{"model":"m","messages":[{"content":"a"}]}', "messages[0].role"),
    (b'{"model":"m","messages":[{"role":"robot","content":"a"}]}', "messages[0].role"),
    (b'{"model":"m","messages":[{"role":"user","content":1}]}', "messages[0].content"),
    (b'{"model":"m","messages":[{"role":"user","content":[{"text":"a"}]}]}', "messages[0].content[0].type"),
    (b'{"model":"m","messages":[],"temperature":"hot"}', "temperature"),
    (b'{"model":"m","messages":[],"temperature":1e999}', "temperature"),
    (b'{"model":"m","messages":[],"temperature":NaN}', None),
    (b'{"model":"m","messages":[],"temperature":Infinity}', None),
    (b'{"model":"m","messages":[],"n":true}', "n"),
    (b'{"model":"m","messages":[],"n":1' + b"0" * 5000 + b"}", "n"),
    (b'{"model":"m","messages":[],"logit_bias":{"1":"x"}}', "logit_bias"),
    (b'{"model":"m","messages":[],"logit_bias":[1]}', "logit_bias"),
    (b'{"model":"m","messages":[],"stop":[1]}', "stop[0]"),
    (b'{"model":"m","messages":[],"stream_options":{"include_usage":1}}', "stream_options.include_usage"),
    (b'{"model":"m","messages":[],"unknown":"\xff"}', None),
    (b'{"model":"m","messages":[],"unknown":"\\ud83d"}', None),
    (b'{"model":"\\ud83d","messages":[]}', None),
    (b'{"model":"m","messages":[]} trailing', None),
    (b"\xef\xbb\xbf{}", None),
]


@pytest.mark.parametrize(("body", "param"), CASES, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(body, chat_decoder)
    assert caught.value.status == 400
    assert caught.value.body.param == param


@pytest.mark.parametrize("prompt", ["[true]", "[1.5]", "[[1.5]]", "[[true]]", "[null]", "{}", "1", "[[[1]]]"])
def test_b049_prompts_of_the_wrong_type_name_prompt(prompt: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(f'{{"model":"m","prompt":{prompt}}}'.encode(), completion_decoder)
    assert (caught.value.body.param or "").split("[")[0] == "prompt"


def test_unknown_fields_are_told_in_order() -> None:
    body, unknown = decode_body(b'{"zeta":1,"model":"m","messages":[],"user":"u","alpha":{"model":1}}', chat_decoder)
    assert body.model == "m"
    assert unknown == ["zeta", "alpha"]
