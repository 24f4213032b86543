"""What requests for responses mean as chat requests."""

import json
from typing import Any

import msgspec
import pytest

from frontend.body import decode_body
from frontend.errors import ApiError
from frontend.protocol import ChatRequest
from frontend.responses_api.protocol import responses_decoder
from frontend.responses_api.request import ignored, translate
from ipc.messages import ModelInfo

MODEL = ModelInfo(names=("m",), max_model_len=100, vocab_size=50, created=0, has_chat_template=True)
THINKING = msgspec.structs.replace(MODEL, reasoning_format="think", template_kwargs=("enable_thinking", "date_string"))
HELLO = {"model": "m", "input": "hi"}
TOOLS = [{"type": "function", "name": "f"}]
ALLOWED = {"type": "allowed_tools", "mode": "required"}


def chat(**fields: Any) -> ChatRequest:
    body = {**HELLO, **fields}
    return translate(decode_body(json.dumps(body).encode(), responses_decoder)[0], MODEL)[0]


def messages(items: Any, **fields: Any) -> list[dict[str, Any]]:
    """Chat messages, without the fields that are not set."""
    found: list[dict[str, Any]] = msgspec.to_builtins(chat(input=items, **fields).messages)
    return [{name: value for name, value in message.items() if value is not None} for message in found]


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_string_is_the_users_message_and_instructions_are_the_systems() -> None:
    expected = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert messages("hi", instructions="be kind") == expected


def test_parameters_have_chats_names() -> None:
    request = chat(max_output_tokens=7, temperature=0.5, top_p=0.25, top_k=3, seed=5, min_p=0.1, stream=True)
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (7, 0.5, 0.25, 3)
    assert (request.seed, request.min_p, request.stream) == (5, 0.1, True)


def test_every_optional_field_may_be_null() -> None:
    body = dict.fromkeys(set(responses_decoder.type.__struct_fields__) - {"model", "input"})
    assert chat(**body) == chat()


def test_parts_are_joined_in_order() -> None:
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "abc"]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "d"}, {"type": "refusal", "refusal": "e"}]},
    ]
    expected = [("developer", "be kind"), ("user", "abc"), ("assistant", "de")]
    assert [(message["role"], message["content"]) for message in messages(items)] == expected


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": f"f{number}", "arguments": "{}", "id": "fc_1"}


def chat_call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": f"f{number}", "arguments": "{}"}}


def output(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": f"out{number}"}


def test_items_of_one_turn_are_one_message() -> None:
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        call(1),
        call(2),
        output(1),
        {**output(2), "output": [{"type": "input_text", "text": "out"}, {"type": "input_text", "text": "2"}]},
        call(3),
        output(3),
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]
    body = decode_body(json.dumps({"model": "m", "input": items}).encode(), responses_decoder)[0]
    request, names = translate(body, MODEL)
    roles = [message.role for message in request.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "assistant"]
    assert [message.content for message in request.messages] == [
        "go", "so", "out1", "out2", None, "out3", "done", "really",
    ]  # fmt: skip
    assert msgspec.to_builtins(request.messages[1].tool_calls) == [chat_call(1), chat_call(2)]
    assert msgspec.to_builtins(request.messages[4].tool_calls) == [chat_call(3)]
    assert [message.tool_call_id for message in request.messages if message.role == "tool"] == ["c1", "c2", "c3"]
    # Errors about them are told about the items.
    assert names.of("messages[1].content") == "input[1].content"
    assert names.of("messages[1].tool_calls[1].function.name") == "input[4].name"
    assert names.of("messages[1].tool_calls[1].id") == "input[4].call_id"
    assert names.of("messages[2]") == "input[5]"
    assert names.of("messages") == "input"


def test_tools_and_formats_take_chats_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [
        {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True},
        {"type": "function", "name": "g"},
    ]
    request = chat(tools=tools, tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    assert msgspec.to_builtins(request.tools)[0]["function"] == {
        "name": "f", "description": "d", "parameters": schema, "strict": True,
    }  # fmt: skip
    assert msgspec.to_builtins(request.tool_choice) == {"type": "function", "function": {"name": "f"}}
    assert chat(tools=tools, tool_choice="required").tool_choice == "required"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    some = chat(tools=tools, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in msgspec.to_builtins(some.tools)] == ["g"]
    assert some.tool_choice == "required"
    body = decode_body(json.dumps({**HELLO, "tools": tools, "tool_choice": allowed}).encode(), responses_decoder)[0]
    assert translate(body, MODEL)[1].of("tools[0].function.parameters") == "tools[1].parameters"
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert msgspec.to_builtins(chat(text={"format": form}).response_format)["type"] == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
        ({"conversation": "conv_1"}, "conversation", "not stored"),
        ({"background": True}, "background", "not stored"),
        ({"tools": TOOLS, "tool_choice": {**ALLOWED, "tools": []}}, "tool_choice.tools", "at least one"),
        ({"tools": TOOLS, "tool_choice": ALLOWED}, "tool_choice.tools", "at least one"),
        ({"tool_choice": {**ALLOWED, "tools": [], "mode": "auto"}}, "tool_choice.tools", "at least one"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "not stored"),
        ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "not"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        ({"input": [{"content": "x"}]}, "input[0].role", "required"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "input_image"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "required"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "mcp"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
            "tool_choice.tools",
            "'x'",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", "16"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert error.body.param == param
    assert words in error.body.message


def test_ignored_fields_are_named() -> None:
    def names(**fields: Any) -> list[str]:
        body = {**HELLO, **fields}
        return ignored(decode_body(json.dumps(body).encode(), responses_decoder)[0], MODEL)

    assert names(store=False, truncation="disabled", text={"format": {"type": "text"}}, include=[]) == []
    assert names(store=True, truncation="auto", text={"verbosity": "low"}) == ["store", "truncation", "text.verbosity"]


@pytest.mark.parametrize(("effort", "think"), [("none", False), ("low", True)])
def test_reasoning_is_told_to_templates_of_models_that_reason(effort: str, think: bool) -> None:
    encoded = json.dumps({"model": "m", "input": "hi", "reasoning": {"effort": effort}}).encode()
    body = decode_body(encoded, responses_decoder)[0]
    assert translate(body, THINKING)[0].chat_template_kwargs == {"enable_thinking": think}
    assert ignored(body, THINKING) == []
    assert translate(body, MODEL)[0].chat_template_kwargs is None
    assert ignored(body, MODEL) == ["reasoning"]


def test_a_choice_among_no_tools_is_no_choice() -> None:
    assert chat(tools=[], tool_choice="auto").tool_choice is None
    assert chat(tool_choice="required").tool_choice == "required"  # which a chat request then refuses
