"""Errors about a chat request in the words of the request that it came from; and bodies of any kind."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.body import decode_body
from frontend.errors import ApiError
from frontend.messages_api.protocol import MessagesRequest, messages_decoder
from frontend.messages_api.request import translate as translate_messages
from frontend.protocol import chat_decoder
from frontend.requests import Job, chat_job
from frontend.responses_api.protocol import ResponsesRequest, responses_decoder
from frontend.responses_api.request import translate as translate_responses
from frontend.translation import ExtraFields, Names
from ipc.messages import ModelInfo

MODEL = ModelInfo(names=("m",), max_model_len=100, vocab_size=50, created=0, has_chat_template=True)
NAMES = Names(
    {
        "messages": "input",
        "messages[1]": "input[4]",
        "messages[1].tool_calls[0].function": "input[5]",
        "max_tokens": "max_output_tokens",
        "stop": "stop_sequences",
        ".parameters": ".input_schema",
    }
)


@pytest.mark.parametrize(
    ("param", "message", "client_param", "client_message"),
    [
        ("max_tokens", "max_tokens must be 1", "max_output_tokens", "max_output_tokens must be 1"),
        ("max_tokens", "9 tokens and max_tokens is 3", "max_output_tokens", "9 tokens and max_output_tokens is 3"),
        ("messages", "messages must not be empty", "input", "input must not be empty"),
        ("messages[1].role", "messages[1].role: no", "input[4].role", "input[4].role: no"),
        ("messages[11].role", "messages[11].role: no", "input[11].role", "input[11].role: no"),
        (
            "messages[1].tool_calls[0].function.name",
            "messages[1].tool_calls[0].function.name must be short",
            "input[5].name",
            "input[5].name must be short",
        ),
        (
            "tools[0].function.parameters",
            "tools[0].function.parameters: no",
            "tools[0].function.parameters",
            "tools[0].function.parameters: no",
        ),
        ("stop", "each stop string must be short", "stop_sequences", "each stop string must be short"),
        ("temperature", "temperature: no", "temperature", "temperature: no"),
        (None, "no", None, "no"),
    ],
)
def test_names_of_the_client(param: str | None, message: str, client_param: str | None, client_message: str) -> None:
    error = NAMES.translate(ApiError(429, message, param=param, code="c", retry_after=2))
    assert (error.status, error.body.code, error.retry_after) == (429, "c", 2)
    assert (error.body.param, error.body.message) == (client_param, client_message)


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def objects(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these members, of any type."""
    return st.dictionaries(st.sampled_from(names), _texts | _json_values, max_size=5)


_texts = st.sampled_from(
    [
        "message",
        "user",
        "assistant",
        "text",
        "input_text",
        "function_call",
        "function",
        "tool_use",
        "tool_result",
        "auto",
    ]
)
_parts = objects("type", "text", "id", "name", "input", "tool_use_id", "content", "refusal", "thinking")
_items = objects("type", "role", "content", "call_id", "name", "arguments", "output", "summary") | st.builds(
    lambda role, parts: {"role": role, "content": parts}, _texts, st.lists(_parts, max_size=3)
)


@given(
    fields=st.dictionaries(st.sampled_from(ResponsesRequest.__struct_fields__), _json_values, max_size=4),
    items=st.lists(_items, max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_no_response_request_raises_anything_but_4xx(fields: dict[str, Any], items: list[Any]) -> None:
    check({"model": "m", "input": items, **fields}, responses_decoder, translate_responses)


@given(
    fields=st.dictionaries(st.sampled_from(MessagesRequest.__struct_fields__), _json_values, max_size=4),
    turns=st.lists(_items, max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_no_messages_request_raises_anything_but_4xx(fields: dict[str, Any], turns: list[Any]) -> None:
    check({"model": "m", "max_tokens": 9, "messages": turns, **fields}, messages_decoder, translate_messages)


def check(body: dict[str, Any], decoder: Any, translate: Any) -> None:
    try:
        chat, _ = translate(decode_body(json.dumps(body).encode(), decoder)[0], MODEL)
        job: Job | ApiError = chat_job(chat, MODEL)
    except ApiError as error:
        job = error
    assert job.prompts if isinstance(job, Job) else job.status in (400, 404)


EXTRAS: dict[str, Any] = {
    "min_p": 0.125,
    "seed": -3,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 1.0,
    "stop_token_ids": [4],
    "ignore_eos": True,
    "min_tokens": 2,
    "logit_bias": {"3": 2},
    "bad_words": ["no"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "stop_on_loop": 4,
    "top_k": 5,
    "priority": -7,
    "ttft_target_ms": 250.5,
    "cache_pin_seconds": 60,
    "cache_salt": "s",
}
CHOICES = [
    {"allowed_token_ids": [1, 2]},
    {"guided_json": {"type": "integer"}},
    {"guided_regex": "a+"},
    {"guided_choice": ["a", "b"]},
    {"guided_grammar": "start: x"},
    {"structured_outputs": {"regex": "a", "whitespace_pattern": None}},
]


def _other_apis(**fields: Any) -> list[tuple[Job, list[str]]]:
    """The job that each of the other APIs makes of these fields, and what it ignores."""
    found = []
    body = json.dumps({"model": "m", "input": "hi", "max_output_tokens": 9, **fields}).encode()
    responses, ignored = decode_body(body, responses_decoder)
    found.append((chat_job(translate_responses(responses, MODEL)[0], MODEL), ignored))
    body = json.dumps({"model": "m", "messages": [HELLO], "max_tokens": 9, **fields}).encode()
    messages, ignored = decode_body(body, messages_decoder)
    found.append((chat_job(translate_messages(messages, MODEL)[0], MODEL), ignored))
    return found


HELLO = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: next(iter(choice)))
def test_fields_beyond_openais_mean_the_same_in_all_apis(choice: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [HELLO], "max_tokens": 9, **EXTRAS, **choice}
    chat, ignored = decode_body(json.dumps(body).encode(), chat_decoder)
    expected = chat_job(chat, MODEL)
    for name in (*EXTRAS, *choice):
        without = chat_job(decode_body(json.dumps({**body, name: None}).encode(), chat_decoder)[0], MODEL)
        assert without != expected, name
    for job, names in _other_apis(**EXTRAS, **choice):
        assert (job.params, job.options, job.cache_salt) == (expected.params, expected.options, expected.cache_salt)
        assert names == ignored


def test_what_the_other_apis_cannot_answer_is_named_as_ignored() -> None:
    fields = {"n": 2, "logprobs": True, "prompt_logprobs": 1, "return_token_ids": True, "best_of": 2, "echo": True}
    for job, names in _other_apis(**fields):
        assert job.params.n == 1
        assert set(names) == set(fields)


def test_two_formats_are_told_in_the_words_of_the_client() -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    for decoder, translate, body, told in (
        (responses_decoder, translate_responses, {"input": "hi", "text": {"format": schema}}, "text.format.schema"),
        (
            messages_decoder,
            translate_messages,
            {"messages": [HELLO], "max_tokens": 9, "output_config": {"format": schema}},
            "output_config.format.schema",
        ),
    ):
        whole = json.dumps({"model": "m", "guided_regex": "a", **body}).encode()
        chat, names = translate(decode_body(whole, decoder)[0], MODEL)  # type: ignore[operator]
        with pytest.raises(ApiError) as caught:
            chat_job(chat, MODEL)
        error = names.translate(caught.value)
        assert error.body.param == "guided_regex"
        assert told in error.body.message
        assert "response_format" not in error.body.message


def test_the_documentation_lists_them_all() -> None:
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text().partition("Both take these fields of chats")[2]
    listed = set(re.findall(r"`(\w+)`", text.partition("Of the others")[0]))
    taken = set(ExtraFields.__struct_fields__) - {"guided_whitespace_pattern"}  # which is only there to be refused
    assert listed == taken | {"top_k", "stop"}  # which each of them has as its own
