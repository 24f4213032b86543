"""What OpenAI requests mean for the engine."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.body import decode_body
from frontend.errors import ApiError
from frontend.protocol import ChatRequest, CompletionRequest, chat_decoder, completion_decoder
from frontend.requests import MAX_PROMPTS, Job, chat_job, completion_job
from ipc.codec import pack_ints
from ipc.messages import (
    ChatMessage,
    ChatPrompt,
    Grammar,
    ModelInfo,
    SamplingDefaults,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)

MODEL = ModelInfo(names=("m", "org/m"), max_model_len=100, vocab_size=50, created=0, has_chat_template=True)


def chat(**fields: Any) -> Job:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_job(decode_body(json.dumps(body).encode(), chat_decoder)[0], MODEL)


def completion(**fields: Any) -> Job:
    body = {"model": "m", "prompt": "hi", **fields}
    return completion_job(decode_body(json.dumps(body).encode(), completion_decoder)[0], MODEL)


def refused(call: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": False, "schema": {}}}},
            Grammar("json_schema", "{}"),
        ),
        ({"structured_outputs": {"json": {"enum": ["ё"]}}}, Grammar("json_schema", '{"enum":["ё"]}')),
        ({"structured_outputs": {"json": '{"a" : 1}'}}, Grammar("json_schema", '{"a" : 1}')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "start: x"}}, Grammar("lark", "start: x")),
        (
            {"guided_json": {"type": "integer", "maximum": 10**25}},
            Grammar("json_schema", f'{{"type":"integer","maximum":{10**25}}}'),
        ),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
        ({"guided_grammar": "start: x"}, Grammar("lark", "start: x")),
    ],
)
def test_every_way_to_ask_for_a_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert chat(**fields).params.grammar == grammar
    assert completion(**fields).params.grammar == grammar


def test_properties_keep_their_order() -> None:
    """The output has them in the order of the schema."""
    schema = {"properties": {"z": {}, "a": {}, "m": {}}}
    grammar = chat(guided_json=schema).params.grammar
    assert grammar is not None
    assert list(json.loads(grammar.source)["properties"]) == ["z", "a", "m"]


def test_defaults_are_openais() -> None:
    assert chat().params == SamplingParams()
    assert completion().params == SamplingParams(max_tokens=16)


def test_null_means_the_default() -> None:
    optional = set(ChatRequest.__struct_fields__) - {"model", "messages"}
    assert chat(**dict.fromkeys(optional)) == chat()
    optional = set(CompletionRequest.__struct_fields__) - {"model", "prompt"}
    assert completion(**dict.fromkeys(optional)) == completion()


def test_every_sampling_field_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "min_p": 0.125,
        "seed": -3,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "n": 3,
        "stop_on_loop": 4,
    }
    sent = {"stop": ["a", "b"], "stop_token_ids": [4], "logit_bias": {"3": 2}}
    wanted = SamplingParams(**fields, stop=("a", "b"), stop_token_ids=(4,), logit_bias={3: 2.0}, logprobs=2)
    assert chat(**fields, **sent, logprobs=True, top_logprobs=2).params == wanted
    assert completion(**fields, **sent, logprobs=2).params == wanted


def test_every_scheduling_field_reaches_the_engine() -> None:
    fields = {"priority": -7, "ttft_target_ms": 250.5, "cache_pin_seconds": 60}
    for job in (chat(**fields, cache_salt="s"), completion(**fields, cache_salt="s")):
        assert job.options == fields
        assert job.cache_salt == "s"
    assert chat().options == {"priority": 0, "ttft_target_ms": None, "cache_pin_seconds": 0.0}
    assert chat().cache_salt == ""


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("priority", -1_000_000, 1_000_000), ("ttft_target_ms", 1, 3_600_000), ("cache_pin_seconds", 0, 3600)],
)
def test_scheduling_fields_have_bounds(name: str, low: int, high: int) -> None:
    for call in (chat, completion):
        for value in (low, high):
            assert call(**{name: value}).options[name] == value  # type: ignore[literal-required]
        for value in (low - 1, high + 1):
            error = refused(call, **{name: value})
            assert (error.status, error.body.param) == (400, name)
            assert error.body.message == f"{name} must be between {low} and {high}"


def test_small_forms() -> None:
    assert chat(stop="x").params.stop == ("x",)
    assert chat(top_k=-1).params.top_k == 0
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(max_tokens=3, max_completion_tokens=4).params.max_tokens == 4
    assert chat(model="org/m").model == "org/m"
    chat(tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"])
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage


def test_chat_contents() -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
    ]
    expected = (
        ChatMessage("system", "be kind"),
        ChatMessage("user", "ab", "ann"),
        ChatMessage("assistant", ""),
        ChatMessage("tool", "42", tool_call_id="x"),
    )
    assert chat(messages=messages).prompts == (ChatPrompt(expected),)


@pytest.mark.parametrize(
    "fields",
    [
        {"content": [{"type": "refusal", "refusal": "I can't."}]},
        {"content": [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "can't."}]},
        {"content": None, "refusal": "I can't."},
        {"refusal": "I can't."},
        {"content": "I can't.", "refusal": None},
        {"content": "I ", "refusal": "can't."},
    ],
    ids=str,
)
def test_a_refusal_is_text_of_the_assistant(fields: dict[str, Any]) -> None:
    """OpenAI's history: a part of type refusal, or the message's field as an answer has it."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", **fields}, {"role": "user", "content": "b"}]
    expected = (ChatMessage("user", "a"), ChatMessage("assistant", "I can't."), ChatMessage("user", "b"))
    assert chat(messages=messages).prompts == (ChatPrompt(expected),)


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
def test_only_the_assistant_refuses(role: str) -> None:
    part = {"type": "refusal", "refusal": "no"}
    error = refused(chat, messages=[{"role": role, "content": [part]}])
    assert (error.status, error.body.param) == (400, "messages[0].content[0]")
    error = refused(chat, messages=[{"role": role, "content": "", "refusal": "no"}])
    assert (error.status, error.body.param) == (400, "messages[0].refusal")
    chat(messages=[{"role": role, "content": "", "refusal": None}])


def test_continuing_the_last_message_drops_the_generation_prompt() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (prompt,) = chat(messages=messages, continue_final_message=True).prompts
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt(pack_ints([1, 2])),)),
        ([[1], [2, 49]], (TokenPrompt(pack_ints([1])), TokenPrompt(pack_ints([2, 49])))),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        [-1],
        [[-1]],
        [2**31],
        [2**70],
        [50],
        [[1], [50]],
        ["a", 1],
        [[1], "a"],
        ["a"] * (MAX_PROMPTS + 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_b049_b051_bad_prompts_name_prompt(prompt: Any) -> None:
    error = refused(completion, prompt=prompt)
    assert error.status == 400
    assert (error.body.param or "").partition("[")[0] == "prompt"


def test_b048_echo() -> None:
    for prompt in ("a", ["a", "b"], [1, 15], [[1], [15]]):
        job = completion(prompt=prompt, echo=True)
        assert job.echo
        assert job.options["return_prompt"]
        assert job.params.prompt_logprobs is None
    assert "return_prompt" not in completion().options
    assert chat(return_token_ids=True).options["return_prompt"]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("value", "output", "prompt"),
    [(None, False, False), (False, False, False), (True, True, True), ("output", True, False)],
)
def test_token_ids_of_the_output_alone_cost_no_prompt(
    make: Callable[..., Job], value: Any, output: bool, prompt: bool
) -> None:
    job = make(return_token_ids=value)
    assert (job.return_token_ids, job.return_prompt_token_ids) == (output, prompt)
    assert ("return_prompt" in job.options) == prompt


@pytest.mark.parametrize("make", [chat, completion])
def test_token_ids_of_something_else_are_refused(make: Callable[..., Job]) -> None:
    assert "return_token_ids" in refused(make, return_token_ids="prompt").body.message


@pytest.mark.parametrize(
    ("fields", "listed", "computed"),
    [
        ({"prompt_logprobs": 3}, 3, 3),
        ({"echo": True, "logprobs": 2}, None, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 0}, 0, 2),
        ({"echo": False, "logprobs": 2}, None, None),
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, None, 0),
        ({"echo": True, "max_tokens": 0}, None, 0),
    ],
)
def test_prompts_are_scored_for_the_list_and_for_the_echo(
    fields: dict[str, Any], listed: int | None, computed: int | None
) -> None:
    job = completion(**fields)
    assert (job.prompt_logprobs, job.params.prompt_logprobs) == (listed, computed)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": False}])
def test_no_output_without_an_echo_makes_no_sense(fields: dict[str, Any]) -> None:
    assert refused(completion, max_tokens=0, **fields).body.param == "max_tokens"


def test_what_a_request_does_not_say_is_as_the_model_recommends() -> None:
    defaults = SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1, 77)
    model = msgspec.structs.replace(MODEL, defaults=defaults)
    body = msgspec.json.encode({"model": "m", "prompt": "a", "temperature": None, "top_p": 0.5})
    params = completion_job(completion_decoder.decode(body), model).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.5, 20, 0.05)
    assert (params.repetition_penalty, params.max_tokens) == (1.1, None), "the tokenizer bounds it by what fits"
    body = msgspec.json.encode({"model": "m", "prompt": "a", "top_k": -1, "max_tokens": 3})
    params = completion_job(completion_decoder.decode(body), model).params
    assert (params.top_k, params.max_tokens) == (0, 3)
    assert completion().params.max_tokens == 16, "OpenAI's"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1}, "best_of"),
        ({"early_stopping": True}, "early_stopping"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": True, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_grammar": "x" * (128 * 1024 + 1)}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"stop_on_loop": 1}, "stop_on_loop"),
        ({"stop_on_loop": -1}, "stop_on_loop"),
        ({"stop_on_loop": 1001}, "stop_on_loop"),
        ({"stop_on_loop": 2.5}, "stop_on_loop"),
        ({"priority": 1.5}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": 2**80}, "priority"),
        ({"ttft_target_ms": True}, "ttft_target_ms"),
        ({"ttft_target_ms": 0.5}, "ttft_target_ms"),
        ({"cache_pin_seconds": -0.5}, "cache_pin_seconds"),
        ({"cache_salt": "s" * 257}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_both_kinds_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    for call in (chat, completion):
        error = refused(call, **fields)
        assert (error.status, error.body.param) == (400, param)
        assert param in error.body.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # this model has no tool format
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"modalities": []}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"audio": {}}, "audio"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "messages[0].content[0].refusal"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
    ids=str,
)
def test_chat_refuses_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(chat, **fields)
    assert (error.status, error.body.param) == (400, param)
    assert param in error.body.message


def test_completion_refuses_suffix() -> None:
    assert refused(completion, suffix="x").body.param == "suffix"


def test_an_unknown_model_is_404_and_names_what_there_is() -> None:
    error = refused(chat, model="gpt-9")
    assert (error.status, error.body.code, error.body.param) == (404, "model_not_found", "model")
    assert "org/m" in error.body.message


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from([*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__]), _json_values
    )
)
@settings(max_examples=300, deadline=None)
def test_no_value_of_any_field_raises_anything_but_4xx(fields: dict[str, Any]) -> None:
    for call in (chat, completion):
        try:
            job: Job | ApiError = call(**fields)
        except ApiError as error:
            job = error
        assert job.prompts if isinstance(job, Job) else job.status in (400, 404)


@pytest.mark.parametrize(("prompt", "name"), [(["a", ""], "prompt[1]"), ([[1], [50]], "prompt[1]"), ([""], "prompt")])
def test_of_several_prompts_the_bad_one_is_named(prompt: Any, name: str) -> None:
    error = refused(completion, prompt=prompt)
    assert error.body.param == name
    assert error.body.message.startswith(name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"guided_json": {}, "guided_whitespace_pattern": ""}, "guided_whitespace_pattern"),
    ],
)
def test_what_would_change_the_output_otherwise_than_here_is_refused(fields: dict[str, Any], param: str) -> None:
    for call in (chat, completion):
        error = refused(call, **fields)
        assert (error.status, error.body.param) == (400, param)
        assert param in error.body.message


def test_all_that_vllms_clients_write_into_structured_outputs_is_taken() -> None:
    """Its own class sends every field, most of them as null."""
    sent = {
        "json": None,
        "regex": "a+",
        "choice": None,
        "grammar": None,
        "json_object": None,
        "disable_fallback": False,
        "disable_any_whitespace": True,
        "disable_additional_properties": False,
        "whitespace_pattern": None,
        "structural_tag": None,
        "_backend": None,
        "_backend_was_auto": False,
    }
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "structured_outputs": sent}
    request, ignored = decode_body(json.dumps(body).encode(), chat_decoder)
    assert chat_job(request, MODEL).params.grammar == Grammar("regex", "a+")
    assert set(ignored) == {f"structured_outputs.{name}" for name in list(sent)[5:]}


def test_a_call_cannot_be_continued() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    error = refused(chat, messages=messages, continue_final_message=True)
    assert (error.status, error.body.param) == (400, "continue_final_message")
    assert "tool_calls" in error.body.message
    assert chat(messages=messages).prompts


def test_unknown_fields_of_nested_objects_are_named_and_no_error() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": False},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "a": 1}, "b": None},
        "tools": [{"type": "function", "function": {"name": "f", "c": {}}, "d": 1}],
        "tool_choice": {"type": "function", "function": {"name": "f", "e": 1}, "g": 1},
        "structured_outputs": None,
        "guided_whitespace_pattern": None,
    }
    _, ignored = decode_body(json.dumps(body).encode(), chat_decoder)
    assert ignored == [
        "stream_options.continuous_usage_stats",
        "response_format.json_schema.a",
        "response_format.b",
        "tools.function.c",
        "tools.d",
        "tool_choice.function.e",
        "tool_choice.g",
        "guided_whitespace_pattern",
    ]
