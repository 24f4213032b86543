"""What callers of the SDK pass becomes messages, or an error that names what is wrong."""

import array
import fractions
import typing
from typing import Any

import msgspec
import pytest

from ipc.codec import pack_ints
from ipc.errors import BadRequest
from ipc.inputs import SamplingOptions, as_params, as_prompt, as_token_ids, split_options
from ipc.messages import ChatMessage, ChatPrompt, Grammar, SamplingParams, TextPrompt, TokenPrompt, ToolCall

CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("é", TextPrompt("é")),
        ([1, 2], TokenPrompt(pack_ints([1, 2]))),
        ((7,), TokenPrompt(pack_ints([7]))),
        ([], TokenPrompt(b"")),
        ([{"role": "user", "content": "Hi"}], ChatPrompt((ChatMessage("user", "Hi"),))),
        ([ChatMessage("user", "Hi")], ChatPrompt((ChatMessage("user", "Hi"),))),
        (
            [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "12"}],
            ChatPrompt(
                (ChatMessage("assistant", "", tool_calls=(ToolCall("c1", "now", "{}"),)), ChatMessage("tool", "12"))
            ),
        ),
        (ChatPrompt((), tools=b"[]"), ChatPrompt((), tools=b"[]")),
    ],
)
def test_prompts(given: Any, made: object) -> None:
    assert as_prompt(given) == made


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (5, "prompt"),
        (None, "prompt"),
        (b"bytes", "prompt"),
        ([1, "a"], "prompt"),
        ([1.5], "prompt"),
        ([2**31], "prompt"),
        (TextPrompt(5), "prompt"),  # type: ignore[arg-type]
        ("\ud800", "prompt"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "user", "content": "Hi"}, "Hi"], "messages[1]"),
        ([{"role": "user", "content": "Hi", "colour": 1}], "messages[0].colour"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": 0}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "tool", "content": None}], "messages[0].content"),
        ([{"role": 5, "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": "Hi"}, {"role": "user", "content": "a", "name": 5}], "messages[1].name"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": "abc"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [ToolCall(1, "x", "{}")]}], "messages[0].tool_calls"),  # type: ignore[arg-type]
        ([ChatMessage("user", 5)], "messages[0].content"),  # type: ignore[arg-type]
        (ChatPrompt("x"), "messages"),  # type: ignore[arg-type]
        (ChatPrompt((), tools="[]"), "tools"),  # type: ignore[arg-type]
        (TokenPrompt("x"), "prompt"),  # type: ignore[arg-type]
        (bytearray(b"text"), "prompt"),
        ([True], "prompt"),
        ([10**30], "prompt"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_named(given: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        as_prompt(given)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_keywords_win_over_params_and_lists_are_taken() -> None:
    base = SamplingParams(max_tokens=5, temperature=0.5)
    made = as_params(base, {"temperature": 0, "stop": "x", "stop_token_ids": [1], "logit_bias": {3: 1}})
    assert made == SamplingParams(max_tokens=5, temperature=0, stop=("x",), stop_token_ids=(1,), logit_bias={3: 1.0})
    assert as_params(None, {"stop": ["a", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": "5"},
        {"temperature": "hot"},
        {"ignore_eos": "yes"},
        {"stop": 5},
        {"stop": [5]},
        {"stop_token_ids": ["a"]},
        {"logit_bias": {"a": 1}},
        {"grammar": "json"},
        {"n": None},
        {"seed": 2**80},
        {"temperature": 10**400},
        {"stop_token_ids": [10**30]},
        {"logit_bias": {10**30: 1}},
        {"stop": "\ud800"},
        {"bad_words": ["\ud800"]},
        {"grammar": Grammar("regex", "\ud800")},
        {"max_tokens": object},
        {"top_k": fractions.Fraction(3)},
    ],
    ids=repr,
)
def test_a_value_of_a_wrong_type_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        as_params(None, given)
    [name] = given
    assert caught.value.param == name
    assert caught.value.message.startswith(name)
    assert "$" not in caught.value.message  # a place in our encoding


@pytest.mark.parametrize("given", [20, {"max_tokens": 20}, "x", SamplingParams], ids=repr)
def test_settings_in_the_place_of_sampling_parameters_are_told_where_they_belong(given: Any) -> None:
    with pytest.raises(BadRequest, match="keywords") as caught:
        as_params(given, {"temperature": 0})
    assert caught.value.param == "params"


@pytest.mark.parametrize("given", ["abc", b"abc", 5, None, [1.5], ["1"], [True], [2**31]], ids=repr)
def test_what_are_no_token_ids_is_an_error_that_says_so(given: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        as_token_ids(given)
    assert caught.value.param == "tokens"


def test_token_ids_may_be_anything_that_yields_them() -> None:
    for given in ([1, 2], (1, 2), range(1, 3), iter([1, 2]), array.array("i", [1, 2])):
        assert as_token_ids(given) == pack_ints([1, 2])


def test_the_keywords_are_the_fields_of_the_parameters() -> None:
    assert set(SamplingOptions.__annotations__) == {field.name for field in msgspec.structs.fields(SamplingParams)}
    everything: Any = dict.fromkeys([*typing.get_type_hints(SamplingOptions), "deadline", "tenant"])
    sampling, others = split_options(everything)
    assert (set(sampling), set(others)) == (set(SamplingOptions.__annotations__), {"deadline", "tenant"})
    with pytest.raises(TypeError, match="'typo' is no keyword"):
        split_options({**everything, "typo": 1})
