"""Bounds of requests, at their edges. The numbers are OpenAI's API reference's where it has one."""

import math
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.codec import pack_ints
from ipc.messages import ChatMessage, ChatPrompt, Generate, Grammar, ModelInfo, SamplingParams, TextPrompt, TokenPrompt
from ipc.validation import InvalidRequest, validate, validate_generate, validate_options

MODEL = ModelInfo(names=("m",), max_model_len=100, vocab_size=50, created=0, has_chat_template=True)
PROMPT = TextPrompt("hello")

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 2},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"top_k": 50},
    {"min_p": 0},
    {"min_p": 1},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"repetition_penalty": 2},
    {"n": 16},
    {"logprobs": 0},
    {"logprobs": 20},
    {"stop": ("x" * 256,) * 16},
    {"stop": ("é" * 128,)},
    {"stop_token_ids": (0, 49) * 32},
    {"logit_bias": {0: -100, 49: 100.0}},
    {"max_tokens": 1},
    {"max_tokens": 99},
    {"max_tokens": 5, "min_tokens": 5},
    {"min_tokens": 99},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"stop_on_loop": 0},
    {"stop_on_loop": 2},
    {"stop_on_loop": 1000},
    {"grammar": Grammar("json_object", "")},
    {"grammar": Grammar("json_schema", "{" + '"a": {' * 62 + '"a": []' + "}" * 63)},
    {"grammar": Grammar("json_schema", "true")},
    {"grammar": Grammar("choice", '["a"]')},
    {"grammar": Grammar("regex", "é" * (64 << 10))},
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"grammar": Grammar("json_object", "{}")}, "grammar"),
    ({"grammar": Grammar("json_schema", "")}, "grammar"),
    ({"grammar": Grammar("json_schema", "[]")}, "grammar"),
    ({"grammar": Grammar("json_schema", "[" * 100_000)}, "grammar"),
    ({"grammar": Grammar("json_schema", "{" + '"a": {' * 63 + '"a": []' + "}" * 64)}, "grammar"),
    ({"grammar": Grammar("choice", "[]")}, "grammar"),
    ({"grammar": Grammar("choice", "[1]")}, "grammar"),
    ({"grammar": Grammar("choice", '["a", ""]')}, "grammar"),
    ({"grammar": Grammar("regex", "é" * (64 << 10) + "a")}, "grammar"),
    ({"grammar": Grammar("regex", "\ud800")}, "grammar"),
    ({"grammar": Grammar("lark", "")}, "grammar"),
    ({"grammar": Grammar("xml", "a")}, "grammar"),  # type: ignore[arg-type]
    ({"temperature": -0.01}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 51}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": math.inf}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": -math.inf}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**40}, "n"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": ("",)}, "stop"),
    ({"stop": ("x" * 257,)}, "stop"),
    ({"stop": ("é" * 129,)}, "stop"),
    ({"stop": ("x",) * 17}, "stop"),
    ({"stop": ("\ud83d",)}, "stop"),
    ({"stop_token_ids": (50,)}, "stop_token_ids"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids"),
    ({"logit_bias": {50: 1}}, "logit_bias"),
    ({"logit_bias": {-1: 1}}, "logit_bias"),
    ({"logit_bias": {1: 100.5}}, "logit_bias"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 100}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 100}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop_on_loop": -1}, "stop_on_loop"),
    ({"stop_on_loop": 1}, "stop_on_loop"),
    ({"stop_on_loop": 1001}, "stop_on_loop"),
    ({"stop_on_loop": 10**30}, "stop_on_loop"),
    ({"stop_on_loop": 2.0}, "stop_on_loop"),
    ({"stop_on_loop": True}, "stop_on_loop"),
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_values_at_the_edge_are_accepted(fields: dict[str, Any]) -> None:
    validate(PROMPT, SamplingParams(**fields), MODEL)


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_values_beyond_the_edge_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        validate(PROMPT, SamplingParams(**fields), MODEL)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"priority": -1_000_000},
        {"priority": 1_000_000},
        {"ttft_target_ms": None},
        {"ttft_target_ms": 1},
        {"ttft_target_ms": 3_600_000.0},
        {"cache_pin_seconds": 0},
        {"cache_pin_seconds": 3600},
        {"namespace": "é" * 128, "tenant": "t" * 128, "external_id": "x" * 128},
    ],
    ids=str,
)
def test_options_at_the_edge_are_accepted(options: dict[str, Any]) -> None:
    validate_options(**options)
    validate_generate(Generate(1, PROMPT, SamplingParams(), **options), MODEL)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("priority", -1_000_001, "1000000"),
        ("priority", 1_000_001, "1000000"),
        ("priority", 10**30, "1000000"),
        ("priority", 1.0, "integer"),
        ("priority", False, "integer"),
        ("priority", None, "integer"),
        ("ttft_target_ms", 0.99, "between 1 and 3600000"),
        ("ttft_target_ms", 3_600_001, "between 1 and 3600000"),
        ("ttft_target_ms", math.nan, "between 1 and 3600000"),
        ("ttft_target_ms", math.inf, "between 1 and 3600000"),
        ("ttft_target_ms", "5", "number"),
        ("cache_pin_seconds", -0.001, "3600"),
        ("cache_pin_seconds", 3600.5, "3600"),
        ("cache_pin_seconds", math.nan, "3600"),
        ("cache_pin_seconds", None, "number"),
        ("namespace", "n" * 129, "128"),
        ("namespace", b"n", "string"),
        ("namespace", "\ud83d", "surrogate"),
        ("tenant", "t" * 129, "128"),
        ("external_id", "x" * 129, "128"),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_options_beyond_the_edge_are_refused_by_name_and_limit(name: str, value: Any, limit: str) -> None:
    options: dict[str, Any] = {name: value}
    request = Generate(1, PROMPT, SamplingParams(), **options)
    for check in (lambda: validate_options(**options), lambda: validate_generate(request, MODEL)):
        with pytest.raises(InvalidRequest) as caught:
            check()
        assert caught.value.param == name
        assert name in caught.value.message
        assert limit in caught.value.message


@pytest.mark.parametrize("ids", [[-1], [50], [51], [2**31 - 1], [-(2**31)], [1, 2, 50], []], ids=str)
def test_b049_b050_token_ids_outside_the_embedding_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(TokenPrompt(pack_ints(ids)), SamplingParams(), MODEL)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("ids", [[0], [49], [0, 49] * 49], ids=len)
def test_b049_b050_token_ids_inside_the_embedding_are_accepted(ids: list[int]) -> None:
    validate(TokenPrompt(pack_ints(ids)), SamplingParams(), MODEL)


def test_token_bytes_of_half_an_integer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        validate(TokenPrompt(b"\0\0\0"), SamplingParams(), MODEL)


def test_b051_empty_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt must not be empty"):
        validate(TextPrompt(""), SamplingParams(), MODEL)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "param"),
    [(99, None, None), (100, None, "prompt"), (60, 40, None), (60, 41, "max_tokens"), (99, 1, None)],
)
def test_prompt_and_output_share_the_context(tokens: int, max_tokens: int | None, param: str | None) -> None:
    prompt, params = TokenPrompt(array("i", [1] * tokens).tobytes()), SamplingParams(max_tokens=max_tokens)
    if param is None:
        validate(prompt, params, MODEL)
        return
    with pytest.raises(InvalidRequest) as caught:
        validate(prompt, params, MODEL)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def _chat(*turns: tuple[str, str], **fields: Any) -> ChatPrompt:
    return ChatPrompt(tuple(ChatMessage(role, content) for role, content in turns), **fields)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (_chat(), "messages"),
        (_chat(("user", "a"), ("robot", "b")), "messages[1].role"),
        (_chat(("user", "\udc00")), "messages[0].content"),
        (_chat(("user", "a"), continue_final_message=True, add_generation_prompt=False), "continue_final_message"),
        (_chat(("assistant", "a"), continue_final_message=True), "continue_final_message"),
    ],
)
def test_chats_are_checked(prompt: ChatPrompt, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(prompt, SamplingParams(), MODEL)
    assert caught.value.param == param


def test_a_model_without_template_cannot_chat() -> None:
    model = msgspec.structs.replace(MODEL, has_chat_template=False)
    with pytest.raises(InvalidRequest, match="chat template"):
        validate(_chat(("user", "a")), SamplingParams(), model)


_anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(
    st.dictionaries(
        st.sampled_from(
            ["temperature", "top_p", "min_p", "top_k", "n", "seed", "max_tokens", "min_tokens", "logprobs"]
        ),
        _anything,
    )
)
def test_any_value_is_either_in_bounds_or_refused_by_name(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    refused = None
    try:
        validate(PROMPT, params, MODEL)
    except InvalidRequest as error:
        refused = error
    if refused is not None:
        assert refused.param in fields
        return
    assert 0 <= params.temperature <= 2
    assert 0 < params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert -1 <= params.top_k <= MODEL.vocab_size
    assert 1 <= params.n <= 16
    assert params.min_tokens <= (params.max_tokens or MODEL.max_model_len - 1) < MODEL.max_model_len
