"""What the official clients build on top of plain requests: parsers, stream helpers, tool rounds, asyncio."""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from tests.e2e.server import Server

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class City(BaseModel):
    """What the model is made to answer with."""

    name: str = Field(max_length=20)
    inhabitants: int = Field(ge=0, le=10**9)


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "find_weather", "description": "Tells the weather of a city.", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


def test_chats_are_parsed_into_models(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "smol", "messages": MESSAGES, "temperature": 0, "response_format": City}
    whole = client.chat.completions.parse(**ask).choices[0].message.parsed
    assert isinstance(whole, City)
    with client.chat.completions.stream(**ask) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == whole
    assert events.count("content.done") == 1
    assert "content.delta" in events


def test_responses_are_parsed_into_models(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "smol", "input": QUESTION, "temperature": 0, "text_format": City}
    whole = client.responses.parse(**ask).output_parsed
    assert isinstance(whole, City)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_parsed == whole
    assert events[-1].type == "response.completed"
    form = {
        "type": "json_schema",
        "name": "city",
        "schema": {**City.model_json_schema(), "additionalProperties": False},
    }
    plain: Any = client.responses.create(
        model="smol", input=QUESTION, temperature=0, text={"format": form}, stream=True
    )
    text = ""
    for event in plain:
        assert type(EVENT.validate_python(event.to_dict())) is type(event)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert City.model_validate_json(text) == whole


@pytest.mark.parametrize("streamed", [False, True])
def test_a_round_of_tools_over_responses(client: openai.OpenAI, streamed: bool) -> None:
    """The call goes back as it came, with its result; the answer is that of the same chat."""
    tools: Any = [{"type": "function", "strict": True, **TOOL}]
    ask: dict[str, Any] = {"model": "smol", "temperature": 0, "tools": tools, "max_output_tokens": 60}
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    if streamed:
        with client.responses.stream(**ask, input=asked, tool_choice="required", parallel_tool_calls=False) as stream:
            arguments = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
            first: Any = stream.get_final_response()
        assert arguments == first.output[0].arguments
    else:
        first = client.responses.create(**ask, input=asked, tool_choice="required", parallel_tool_calls=False)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "find_weather")
    assert list(json.loads(call.arguments)) == ["city"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "snow"}'}
    second = client.responses.create(**ask, input=[*asked, *first.output, result], tool_choice="none")
    chat: Any = client.chat.completions.create(
        model="smol",
        temperature=0,
        max_tokens=60,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice="none",
        messages=[
            *asked,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": '{"weather": "snow"}'},
        ],
    )
    assert second.output_text == chat.choices[0].message.content
    assert second.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens


def test_tool_calls_of_the_chat_stream_helper(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(City, name="save_city")]
    ask: dict[str, Any] = {
        "model": "smol",
        "messages": MESSAGES,
        "temperature": 0,
        "tools": tools,
        "tool_choice": {"type": "function", "function": {"name": "save_city"}},
    }
    (whole,) = client.chat.completions.parse(**ask).choices[0].message.tool_calls or []
    with client.chat.completions.stream(**ask) as stream:
        done: list[Any] = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        (final,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(whole.function.parsed_arguments, City)
    assert final.function.parsed_arguments == done[0].parsed_arguments == whole.function.parsed_arguments


def test_a_round_of_tools_over_messages(claude: anthropic.Anthropic) -> None:
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": PARAMETERS}
    ask: dict[str, Any] = {"model": "smol", "max_tokens": 60, "tools": [tool], "extra_body": {"temperature": 0}}
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    forced: Any = {"type": "tool", "name": "find_weather"}
    with claude.messages.stream(**ask, messages=asked, tool_choice=forced) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    (block,) = first.content
    assert block.type == "tool_use"
    assert json.loads("".join(parts)) == block.input
    whole = claude.messages.create(**ask, messages=asked, tool_choice=forced)
    assert whole.content[0].input == block.input  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "snow"}
    turns = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with claude.messages.stream(**ask, messages=turns, tool_choice={"type": "none"}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    again = claude.messages.create(**ask, messages=turns, tool_choice={"type": "none"})
    assert text == final.content[0].text == again.content[0].text  # type: ignore[union-attr]


def test_many_at_once_over_asyncio(server: Server) -> None:
    """Both clients' asynchronous faces, streamed and whole, all together: each gets what it would get alone."""

    async def chat(client: openai.AsyncOpenAI, stream: bool) -> str:
        if not stream:
            whole = await client.chat.completions.create(model="smol", messages=MESSAGES, temperature=0, max_tokens=24)
            return whole.choices[0].message.content or ""
        async with client.chat.completions.stream(
            model="smol", messages=MESSAGES, temperature=0, max_tokens=24
        ) as helper:
            return "".join([event.delta async for event in helper if event.type == "content.delta"])

    async def response(client: openai.AsyncOpenAI) -> str:
        async with client.responses.stream(model="smol", input=QUESTION, temperature=0, max_output_tokens=24) as helper:
            return "".join([event.delta async for event in helper if event.type == "response.output_text.delta"])

    async def message(client: anthropic.AsyncAnthropic) -> str:
        ask: Any = {"model": "smol", "messages": MESSAGES, "max_tokens": 24, "extra_body": {"temperature": 0}}
        async with client.messages.stream(**ask) as helper:
            return "".join([text async for text in helper.text_stream])

    async def main() -> list[str]:
        async with (
            openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0) as claude,
        ):
            kinds = [chat(client, False), chat(client, True), response(client), message(claude)]
            more = [chat(client, False), chat(client, True), response(client), message(claude)]
            return await asyncio.gather(*kinds, *more)

    texts = asyncio.run(main())
    assert len(texts) == 8
    assert len(set(texts)) == 1
    assert "Paris" in texts[0]


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nobody", input="x")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody", input="x")
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.parse(model="smol", input="x", text_format=City, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError), client.responses.stream(model="smol", input="x", top_p=0) as stream:
        list(stream)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="smol", messages=MESSAGES, response_format=City, max_tokens=2)
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="smol", prompt="x" * (5 << 20))
    assert large.value.status_code == 413
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="nobody", max_tokens=1, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="smol", max_tokens=0, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError), claude.messages.stream(model="smol", max_tokens=9, messages=[]) as s:
        list(s)
    with pytest.raises(anthropic.RequestTooLargeError):
        claude.messages.create(model="smol", max_tokens=1, messages=[{"role": "user", "content": "x" * (5 << 20)}])
