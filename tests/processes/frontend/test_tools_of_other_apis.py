"""Tools and reasoning under the official clients of the Responses and Messages APIs."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from ..fake_engine import MODEL, FakeEngine
from .process import Frontend

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": WEATHER}
TOOL: Any = {"name": "get_weather", "description": "Weather.", "input_schema": WEATHER}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TIME = '<tool_call>{"name": "get_time", "arguments": null}</tool_call>'
ALL = f"<think>\nHm.\n</think>\n\nOne moment.\n{CALL}\n{TIME}"
TIME_TOOL: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
TIME_FUNCTION = {"type": "function", "name": "get_time"}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    model = msgspec.structs.replace(
        MODEL, tool_format="hermes", reasoning_format="think", template_kwargs=("enable_thinking",)
    )
    engine = FakeEngine(tmp_path_factory.mktemp("thinker"), model=model)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def url(thinker: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    frontend = Frontend(tmp_path_factory.mktemp("run"), thinker).wait_until_ready()
    yield f"http://127.0.0.1:{frontend.port}"
    frontend.close()
    assert b"Traceback" not in frontend.stderr, frontend.stderr.decode()


@pytest.fixture(scope="module")
def responses(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client.responses


@pytest.fixture(scope="module")
def messages(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client.messages


def say(text: str) -> str:
    return f"say {json.dumps(text)}"


def test_b063_calls_and_reasoning_of_a_response(responses: Any) -> None:
    ask: Any = {"model": "tiny", "input": say(ALL), "tools": [FUNCTION, TIME_FUNCTION]}
    whole = responses.create(**ask)
    with responses.stream(**ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    for response in (whole, final):
        thought, text, weather, time = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
        assert (text.type, text.content[0].text.strip()) == ("message", "One moment.")
        assert (weather.type, weather.name, weather.arguments) == (
            "function_call",
            "get_weather",
            '{"city": "Köln"}',
        )
        assert (time.name, time.arguments) == ("get_time", "{}")
        assert weather.call_id != time.call_id
        assert response.status == "completed"
        assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_calls_and_reasoning_of_a_response_can_be_sent_back(responses: Any, thinker: FakeEngine) -> None:
    first = responses.create(model="tiny", input=say(ALL), tools=[FUNCTION, TIME_FUNCTION])
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": item.name}
        for item in first.output
        if item.type == "function_call"
    ]
    answer = responses.with_raw_response.create(
        model="tiny",
        input=[{"role": "user", "content": "go"}, *first.output, *outputs],
        tools=[FUNCTION, TIME_FUNCTION],
        extra_headers={"x-request-id": "response-back"},
    )
    assert "x-tokenmill-ignored" not in answer.headers
    prompt = thinker.wait_for_request("response-back").prompt
    user, assistant, *tools = prompt.messages  # type: ignore[union-attr]
    assert (user.content, assistant.content.strip(), assistant.reasoning) == ("go", "One moment.", "Hm.")
    assert [call.name for call in assistant.tool_calls] == ["get_weather", "get_time"]
    assert [(turn.role, turn.content, turn.tool_call_id) for turn in tools] == [
        ("tool", call.name, call.id) for call in assistant.tool_calls
    ]
    offered = json.loads(prompt.tools)  # type: ignore[union-attr]
    assert [tool["function"]["name"] for tool in offered] == ["get_weather", "get_time"]


def test_b063_calls_and_thinking_of_a_message(messages: Any) -> None:
    ask: Any = {
        "model": "tiny",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": say(ALL)}],
        "tools": [TOOL, TIME_TOOL],
    }
    whole = messages.create(**ask)
    with messages.stream(**ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    for message in (whole, final):
        thought, text, weather, time = message.content
        assert (thought.type, thought.thinking) == ("thinking", "Hm.")
        assert (text.type, text.text.strip()) == ("text", "One moment.")
        assert (weather.type, weather.name, weather.input) == ("tool_use", "get_weather", {"city": "Köln"})
        assert (time.name, time.input) == ("get_time", {})
        assert weather.id != time.id
        assert message.stop_reason == "tool_use"


def test_calls_and_thinking_of_a_message_can_be_sent_back(messages: Any, thinker: FakeEngine) -> None:
    ask: Any = {"model": "tiny", "max_tokens": 100, "tools": [TOOL, TIME_TOOL]}
    go = {"role": "user", "content": say(ALL)}
    first = messages.create(**ask, messages=[go])
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": block.name}
        for block in first.content
        if block.type == "tool_use"
    ]
    answer = messages.with_raw_response.create(
        **ask,
        messages=[go, first.to_param(), {"role": "user", "content": results}],
        thinking={"type": "adaptive"},
        extra_headers={"x-request-id": "message-back"},
    )
    assert "x-tokenmill-ignored" not in answer.headers
    prompt = thinker.wait_for_request("message-back").prompt
    _, assistant, *tools = prompt.messages  # type: ignore[union-attr]
    assert (assistant.content.strip(), assistant.reasoning) == ("One moment.", "Hm.")
    assert [(turn.role, turn.content, turn.tool_call_id) for turn in tools] == [
        ("tool", call.name, call.id) for call in assistant.tool_calls
    ]
    assert json.loads(prompt.template_kwargs) == {"enable_thinking": True}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("choice", "grammar", "parallel"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "get_time"}, True, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
    ],
)
def test_a_demanded_call_is_a_grammar(
    messages: Any, thinker: FakeEngine, choice: Any, grammar: bool, parallel: bool
) -> None:
    name = f"demanded-{len(thinker.requests)}"
    answer = messages.create(
        model="tiny",
        max_tokens=100,
        messages=[{"role": "user", "content": say(CALL + TIME)}],
        tools=[TOOL, TIME_TOOL],
        tool_choice=choice,
        extra_headers={"x-request-id": name},
    )
    assert (thinker.wait_for_request(name).params.grammar is not None) == grammar
    assert len(answer.content) == (2 if parallel else 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tools has no function 'x'"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name must have 1 to 64 of the characters"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: there is another tool of this name"),
        ({"tools": [{**TOOL, "input_schema": {"type": "string"}}]}, "tools[0].input_schema must be a JSON schema"),
    ],
)
def test_errors_about_tools_name_them_as_they_were_sent(messages: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.create(**{"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], **fields})
    assert words in str(caught.value.api_message)


def test_errors_about_functions_name_them_as_they_were_sent(responses: Any) -> None:
    for tools, param in (
        ([{**FUNCTION, "name": "a b"}], "tools[0].name"),
        ([FUNCTION, FUNCTION], "tools[1].name"),
        ([{**FUNCTION, "parameters": {"type": "string"}}], "tools[0].parameters"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            responses.create(model="tiny", input="x", tools=tools)
        assert caught.value.param == param
        assert param in caught.value.message


@pytest.mark.parametrize("limit", [2, 8, 18])
def test_a_demanded_call_that_the_limit_cuts_is_no_text(responses: Any, messages: Any, limit: int) -> None:
    """Cut in the opening mark, inside the name, and inside the arguments, which stay as far as they came."""
    whole = responses.create(
        model="tiny", input=say(CALL), tools=[FUNCTION], tool_choice="required", max_output_tokens=limit
    )
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output_text == ""
    assert [(item.type, item.status) for item in whole.output] == (
        [("function_call", "incomplete")] if limit > 9 else []
    )

    ask: Any = {
        "model": "tiny",
        "max_tokens": limit,
        "messages": [{"role": "user", "content": say(CALL)}],
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
    }
    with messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == ""
    message = messages.create(**ask)
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == (["tool_use"] if limit > 9 else [])


def test_fields_beyond_openais_reach_the_engine(responses: Any, messages: Any, thinker: FakeEngine) -> None:
    extra: Any = {
        "guided_choice": ["a", "b"],
        "bad_words": ["x"],
        "logit_bias": {"7": 1},
        "min_p": 0.5,
        "n": 2,
        "structured_outputs": None,
    }
    for name, create in (
        ("extra-responses", lambda **more: responses.with_raw_response.create(model="tiny", input="x", **more)),
        (
            "extra-messages",
            lambda **more: messages.with_raw_response.create(
                model="tiny", max_tokens=9, messages=[{"role": "user", "content": "x"}], **more
            ),
        ),
    ):
        answer = create(extra_body=extra, extra_headers={"x-request-id": name})
        assert answer.headers["x-tokenmill-ignored"] == "n"
        params = thinker.wait_for_request(name).params
        assert params.grammar is not None
        assert (params.grammar.source, params.bad_words, params.logit_bias) == ('["a","b"]', ("x",), {7: 1.0})
