"""Tool calls of the real model, which the grammar makes well-formed, under the official `openai` client and the SDK."""

import json
from typing import Any

import jsonschema
import openai
import pytest

from ipc import Client
from ipc.messages import ChatMessage, ChatPrompt
from tests.e2e.server import Server

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"$ref": "#/$defs/Unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "description": "The time now."}},
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def ask(client: openai.OpenAI, *, stream: bool, **options: Any) -> Any:
    """The finished completion; of a stream what the client's own helper puts together."""
    options = {"model": "smol", "messages": QUESTION, "tools": TOOLS, "max_tokens": 120, "temperature": 0, **options}
    if not stream:
        return client.chat.completions.create(**options)
    with client.chat.completions.stream(**options) as events:
        for _ in events:
            pass
        return events.get_final_completion()


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_required_call_is_well_formed_and_the_same_streamed(client: openai.OpenAI) -> None:
    answers = []
    for stream in (False, True):
        (choice,) = ask(client, stream=stream, tool_choice="required", parallel_tool_calls=False).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        if call.function.name == "get_weather":
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        answers.append((call.function.name, call.function.arguments))
    assert answers[0] == answers[1]


def test_named_calls_of_several_choices_match_their_schema(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tool_choice": named("get_weather"), "n": 3, "temperature": 1, "seed": 5}
    for choice in ask(client, stream=False, **options).choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)


@pytest.mark.parametrize("stream", [False, True])
def test_b063_a_required_call_without_parameters(client: openai.OpenAI, stream: bool) -> None:
    time = [tool for tool in TOOLS if tool["function"]["name"] == "get_time"]
    (choice,) = ask(client, stream=stream, tools=time, tool_choice="required", parallel_tool_calls=False).choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "get_time", "{}")
    assert call.id.startswith("call_")


def test_a_schema_that_cannot_be_enforced_is_refused(client: openai.OpenAI) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, stream=False, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert caught.value.param == "tools[0].function.parameters"
    assert 'tools[0].function.parameters: Unimplemented keys: ["not"]' in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_that_the_limit_cuts_is_no_text(client: openai.OpenAI, stream: bool) -> None:
    for limit in (3, 9, 30):
        try:
            (choice,) = ask(client, stream=stream, tool_choice="required", max_tokens=limit).choices
        except openai.LengthFinishReasonError as error:  # what the client's helper makes of it
            (choice,) = error.completion.choices
        assert choice.finish_reason == "length"
        assert not choice.message.content


@pytest.mark.parametrize("strict", [False, True])
def test_a_strict_call_that_the_model_chooses_has_arguments_of_its_schema(client: openai.OpenAI, strict: bool) -> None:
    """Left alone, this model repeats its earlier calls, whose arguments are not what the schema asks for."""
    messages: list[Any] = []
    for city in ("Rome", "Oslo", "Bonn"):
        earlier = {"name": "get_weather", "arguments": json.dumps({"town": city})}
        messages += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "tool_calls": [{"id": city, "type": "function", "function": earlier}]},
        ]
    messages += QUESTION
    function = {"name": "get_weather", "parameters": WEATHER, "strict": strict}
    (choice,) = ask(client, stream=False, messages=messages, tools=[{"type": "function", "function": function}]).choices
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        valid = jsonschema.Draft202012Validator(WEATHER).is_valid(json.loads(call.function.arguments))
        assert valid == strict


def test_several_calls_may_be_required(client: openai.OpenAI) -> None:
    (choice,) = ask(client, stream=False, tool_choice="required", tools=TOOLS[1:], max_tokens=400).choices
    assert choice.finish_reason == "tool_calls"
    assert 1 <= len(choice.message.tool_calls) <= 8
    assert {call.function.arguments for call in choice.message.tool_calls} == {"{}"}


def test_b059_calls_and_results_of_earlier_turns(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_secret_number", "arguments": "{}"}}
    for assistant in ({"content": None}, {}, {"content": [{"type": "text", "text": "Wait."}]}):
        messages = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "What is the secret"}, {"type": "text", "text": " number?"}],
            },
            {"role": "assistant", **assistant, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "42.69"},
        ]
        answer = ask(client, stream=False, messages=messages, tools=openai.omit)
        assert "42" in answer.choices[0].message.content


def test_the_sdk_gets_the_raw_text(server: Server) -> None:
    prompt = ChatPrompt((ChatMessage("user", "What time is it?"),), tools=json.dumps(TOOLS[1:]).encode())
    endpoint = server.stderr.split("ZeroMQ clients: ")[1].split(")")[0]
    with Client(endpoint) as sdk:
        answer = sdk.generate(prompt, max_tokens=5, temperature=0)
        plain = sdk.generate([{"role": "user", "content": "What time is it?"}], max_tokens=5, temperature=0)
    assert answer.text
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 40


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "Hi"}]])
def test_b057_a_last_assistant_message(client: openai.OpenAI, messages: list[Any]) -> None:
    messages = [*messages, {"role": "assistant", "content": "Hello, who are you?"}]
    new_turn = client.chat.completions.create(model="smol", messages=messages, max_tokens=5)
    assert new_turn.choices[0].message.content is not None
    going_on = client.chat.completions.create(
        model="smol", messages=messages, max_tokens=5, extra_body={"continue_final_message": True}
    )
    assert going_on.usage.prompt_tokens < new_turn.usage.prompt_tokens


def test_both_ways_to_end_the_prompt_exclude_each_other(client: openai.OpenAI) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.chat.completions.create(
            model="smol", messages=[{"role": "assistant", "content": "I"}], extra_body=both, max_tokens=5
        )
