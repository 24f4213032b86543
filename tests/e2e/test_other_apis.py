"""OpenAI's Responses API and Anthropic's Messages API on the real model: the same tokens as its chat completions."""

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.server import Server

SYSTEM = "You are a helpful assistant."
QUESTION = "What is the capital of France?"
CHAT: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def anthropic_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def expected(openai_client: openai.OpenAI) -> Any:
    return openai_client.chat.completions.create(model="smol", messages=CHAT, temperature=0, max_tokens=30)


def test_responses_answer_as_chats_do(openai_client: openai.OpenAI, expected: Any) -> None:
    ask: dict[str, Any] = {
        "model": "smol",
        "instructions": SYSTEM,
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": 30,
    }
    whole = openai_client.responses.create(**ask)
    with openai_client.responses.stream(**ask) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert "Paris" in whole.output_text
    assert text == whole.output_text == expected.choices[0].message.content
    assert whole.status == {"stop": "completed", "length": "incomplete"}[expected.choices[0].finish_reason]
    assert whole.usage is not None
    assert whole.usage.input_tokens == expected.usage.prompt_tokens
    assert whole.usage.output_tokens == expected.usage.completion_tokens
    counted = openai_client.responses.input_tokens.count(model="smol", instructions=SYSTEM, input=QUESTION)
    assert counted.input_tokens == whole.usage.input_tokens


def test_messages_answer_as_chats_do(anthropic_client: anthropic.Anthropic, expected: Any) -> None:
    ask: dict[str, Any] = {
        "model": "smol",
        "system": SYSTEM,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 30,
        "extra_body": {"temperature": 0},
    }
    whole = anthropic_client.messages.create(**ask)
    with anthropic_client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in whole.content] == [text] == [expected.choices[0].message.content]
    assert whole.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[expected.choices[0].finish_reason]
    counted = anthropic_client.messages.count_tokens(model="smol", system=SYSTEM, messages=ask["messages"])
    assert counted.input_tokens == expected.usage.prompt_tokens
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
        assert usage.output_tokens == expected.usage.completion_tokens


def test_a_stop_sequence_is_told_and_not_shown(anthropic_client: anthropic.Anthropic, expected: Any) -> None:
    text = expected.choices[0].message.content
    answer = anthropic_client.messages.create(
        model="smol",
        system=SYSTEM,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=30,
        stop_sequences=["Paris"],
        extra_body={"temperature": 0},
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")
    assert "".join(block.text for block in answer.content) == text.split("Paris")[0]


def test_a_prefilled_answer_is_continued(anthropic_client: anthropic.Anthropic) -> None:
    answer = anthropic_client.messages.create(
        model="smol",
        messages=[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The capital of France is"}],
        max_tokens=4,
        extra_body={"temperature": 0},
    )
    assert answer.content[0].text.startswith(" Paris")


def test_a_prompt_too_long_names_the_clients_parameter(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    long = "word " * 9000
    with pytest.raises(openai.BadRequestError, match="tokens") as caught:
        openai_client.responses.create(model="smol", input=long)
    assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.responses.create(model="smol", input=QUESTION, max_output_tokens=8191)
    assert caught.value.param == "max_output_tokens"
    assert "max_output_tokens is 8191" in caught.value.message
    with pytest.raises(anthropic.BadRequestError, match="tokens"):
        anthropic_client.messages.create(model="smol", max_tokens=10, messages=[{"role": "user", "content": long}])


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_a_schema_is_kept(openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic) -> None:
    form: Any = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    response = openai_client.responses.create(model="smol", input=QUESTION, text={"format": form}, temperature=0)
    message = anthropic_client.messages.create(
        model="smol",
        max_tokens=60,
        messages=[{"role": "user", "content": QUESTION}],
        output_config={"format": {"type": "json_schema", "schema": CITY}},
        extra_body={"temperature": 0},
    )
    answers = [json.loads(response.output_text), json.loads(message.content[0].text)]
    assert answers[0] == answers[1]
    assert isinstance(answers[0]["city"], str)
    assert list(answers[0]) == ["city"]
    assert (response.status, message.stop_reason) == ("completed", "end_turn")


def test_a_schema_that_cannot_be_compiled_is_named(openai_client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "bad", "schema": {"type": "object", "$ref": "#/nowhere"}}
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.responses.create(model="smol", input=QUESTION, text={"format": form})
    assert caught.value.param == "text.format.schema"


def test_demanded_calls(openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic) -> None:
    tool: Any = {"name": "find_city", "description": "Finds a city.", "input_schema": CITY}
    ask: Any = {"model": "smol", "messages": [{"role": "user", "content": QUESTION}], "tools": [tool]}
    choice: Any = {"type": "tool", "name": "find_city"}
    message = anthropic_client.messages.create(**ask, tool_choice=choice, max_tokens=80, extra_body={"temperature": 0})
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"
    counted = anthropic_client.messages.count_tokens(**ask, tool_choice=choice)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    response = openai_client.responses.create(
        model="smol",
        input=QUESTION,
        tools=[{"type": "function", "name": "find_city", "description": "Finds a city.", "parameters": CITY}],
        tool_choice={"type": "function", "name": "find_city"},
        temperature=0,
    )
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "find_city")
    assert json.loads(call.arguments) == message.content[0].input
    assert isinstance(message.content[0].input["city"], str)
