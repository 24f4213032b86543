"""What Anthropic's messages requests mean as chat requests."""

import json
from typing import Any

import msgspec
import pytest

from frontend.body import decode_body
from frontend.errors import ApiError
from frontend.messages_api.protocol import count_tokens_decoder, messages_decoder
from frontend.messages_api.request import ignored, translate, translate_prompt
from frontend.protocol import ChatRequest
from ipc.messages import ModelInfo

MODEL = ModelInfo(names=("m",), max_model_len=100, vocab_size=50, created=0, has_chat_template=True)
THINKING = msgspec.structs.replace(MODEL, reasoning_format="think", template_kwargs=("enable_thinking", "date_string"))

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 9, "messages": HELLO, **fields}
    return translate(decode_body(json.dumps(body).encode(), messages_decoder)[0], MODEL)[0]


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


def test_parameters_have_chats_names() -> None:
    request = chat(temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["a", "b"], seed=5, stream=True)
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (9, 0.5, 0.25, 3)
    assert (request.stop, request.seed, request.stream) == (["a", "b"], 5, True)


def test_every_optional_field_may_be_null() -> None:
    body = dict.fromkeys(set(messages_decoder.type.__struct_fields__) - {"model", "messages", "max_tokens"})
    assert chat(**body) == chat()


@pytest.mark.parametrize("system", ["be kind", [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]])
def test_system_is_the_first_message(system: Any) -> None:
    found = [(message.role, message.content) for message in chat(system=system).messages]
    assert found == [("system", "be kind"), ("user", "hi")]


def test_blocks_are_messages_of_their_roles() -> None:
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Köln"}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "r1"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "r2"}]},
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "c"},
            ],
        },
        {"role": "system", "content": "briefly"},
    ]
    body = decode_body(json.dumps({"model": "m", "max_tokens": 9, "messages": conversation}).encode(), messages_decoder)
    request, names = translate(body[0], MODEL)
    assert [(message.role, message.content) for message in request.messages] == [
        ("user", "ab"),
        ("assistant", "so"),
        ("tool", "r1"),
        ("tool", "r2"),
        ("tool", ""),
        ("user", "c"),
        ("system", "briefly"),
    ]
    calls = msgspec.to_builtins(request.messages[1].tool_calls)
    assert [(entry["id"], entry["function"]["name"]) for entry in calls] == [("t1", "f"), ("t2", "g")]
    assert [json.loads(entry["function"]["arguments"]) for entry in calls] == [{"city": "Köln"}, {}]
    assert [message.tool_call_id for message in request.messages[2:5]] == ["t1", "t2", "t3"]
    # Errors about them are told about the blocks.
    assert names.of("messages[1].tool_calls[1].function.name") == "messages[1].content[4].name"
    assert names.of("messages[1].tool_calls[1].function.arguments") == "messages[1].content[4].input"
    assert names.of("messages[3].tool_call_id") == "messages[2].content[1].tool_call_id"
    assert names.of("messages[6].content") == "messages[3].content"


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    assert not chat().continue_final_message
    assert chat(messages=[*HELLO, {"role": "assistant", "content": "The answer is"}]).continue_final_message


def test_tools_take_chats_form() -> None:
    request = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    assert msgspec.to_builtins(request.tools)[0]["function"] == {"name": "f", "description": "d", "parameters": SCHEMA}
    assert msgspec.to_builtins(request.tool_choice) == {"type": "function", "function": {"name": "f"}}
    for choice, expected in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert chat(tools=[TOOL], tool_choice={"type": choice}).tool_choice == expected
    form = {"type": "json_schema", "schema": SCHEMA}
    assert msgspec.to_builtins(chat(output_config={"format": form}).response_format)["type"] == "json_schema"


def test_counting_looks_at_the_same_prompt() -> None:
    fields = {"system": "s", "messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "any"}}
    body = decode_body(json.dumps({"model": "m", **fields}).encode(), count_tokens_decoder)[0]
    counted, _ = translate_prompt(body, MODEL)
    asked = chat(**fields)
    for name in ("messages", "tools", "tool_choice", "continue_final_message"):
        assert getattr(counted, name) == getattr(asked, name)


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 1.5}, "temperature", "between 0 and 1"),
        ({"temperature": -0.1}, "temperature", "between 0 and 1"),
        (block(type="image", source={}), "messages[0].content[0]", "'image'"),
        (block(type="document", source={}), "messages[0].content[0]", "'document'"),
        (block(type="tool_use", id="x", name="f", input={}), "messages[0].content[0]", "'tool_use'"),
        (block(type="text"), "messages[0].content[0].text", "required"),
        (block(type="tool_result"), "messages[0].content[0].tool_use_id", "required"),
        (
            block(type="tool_result", tool_use_id="t", content=[{"type": "image"}]),
            "messages[0].content[0].content[0]",
            "'image'",
        ),
        ({"system": [{"type": "image"}]}, "system[0]", "'image'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "f", "input": {}}]}
                ]
            },
            "messages[0]",
            "tool_result",
        ),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type", "bash_20250124"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "required"),
        ({"max_tokens": None}, "max_tokens", "int"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert error.body.param == param
    assert words in error.body.message


def test_ignored_fields_are_named() -> None:
    def names(model: ModelInfo = MODEL, **fields: Any) -> list[str]:
        body = {"model": "m", "max_tokens": 9, "messages": HELLO, **fields}
        return ignored(decode_body(json.dumps(body).encode(), messages_decoder)[0], model)

    assert names(thinking={"type": "disabled"}, output_config={}) == []
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert names(thinking=thinking, output_config={"effort": "low"}) == ["thinking", "output_config.effort"]
    assert names(THINKING, thinking=thinking) == ["thinking.budget_tokens"]
    assert names(THINKING, thinking={"type": "adaptive"}) == []


def test_thinking_is_told_to_templates_of_models_that_think() -> None:
    for kind, think in (("enabled", True), ("adaptive", True), ("disabled", False)):
        encoded = json.dumps({"model": "m", "max_tokens": 9, "messages": HELLO, "thinking": {"type": kind}}).encode()
        body = decode_body(encoded, messages_decoder)[0]
        assert translate(body, THINKING)[0].chat_template_kwargs == {"enable_thinking": think}
        assert translate(body, MODEL)[0].chat_template_kwargs is None


def test_a_choice_among_no_tools_is_no_choice() -> None:
    assert chat(tool_choice={"type": "auto"}).tool_choice is None
    assert chat(tool_choice={"type": "any"}).tool_choice == "required"  # which a chat request then refuses
