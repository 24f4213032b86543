"""Tools and reasoning under the official openai client."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionAllowedToolChoiceParam, ChatCompletionAssistantMessageParam

from ..fake_engine import MODEL, FakeEngine
from .process import Frontend

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    model = msgspec.structs.replace(
        MODEL,
        tool_format="hermes",
        reasoning_format="think",
        template_kwargs=("enable_thinking",),
        special_tokens={"<tool_call>": 900},
    )
    engine = FakeEngine(tmp_path_factory.mktemp("thinker"), model=model)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def client(thinker: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    frontend = Frontend(tmp_path_factory.mktemp("run"), thinker).wait_until_ready()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{frontend.port}/v1", api_key="none", max_retries=0) as client:
        yield client
    frontend.close()
    assert b"Traceback" not in frontend.stderr, frontend.stderr.decode()


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"say {json.dumps(text)}"}]


def streamed(client: openai.OpenAI, text: str, **options: Any) -> Any:
    """What the client's own helper puts together."""
    with client.chat.completions.stream(model="tiny", messages=say(text), tools=TOOLS, **options) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, [("get_weather", '{"city": "Köln"}')]),
        (f"One moment.\n{CALL}\n{TIME}", "One moment.", [("get_weather", '{"city": "Köln"}'), ("get_time", "{}")]),
        (f"<think>\nHm.\n</think>\n\n{TIME}", None, [("get_time", "{}")]),
        ("No call at all.", "No call at all.", []),
        ("<tool_call>broken", "<tool_call>broken", []),
    ],
)
def test_calls_streamed_and_not(
    client: openai.OpenAI, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    whole = client.chat.completions.create(model="tiny", messages=say(text), tools=TOOLS)
    for completion in (whole, streamed(client, text)):
        choice = completion.choices[0]
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        assert choice.message.content == content
        found = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in found] == calls
        assert all(call.type == "function" and call.id.startswith("call_") for call in found)
        assert len({call.id for call in found}) == len(calls)


def test_a_call_that_a_stop_string_cut_is_no_call_to_make(client: openai.OpenAI) -> None:
    cut = CALL[: CALL.index("Köln") + 2]
    whole = client.chat.completions.create(model="tiny", messages=say(cut), tools=TOOLS)
    for completion in (whole, streamed(client, cut)):
        assert completion.choices[0].finish_reason == "stop"


def test_b063_a_call_without_parameters(client: openai.OpenAI) -> None:
    text = '<tool_call>{"name": "get_time", "arguments": null}</tool_call>'
    chunks = client.chat.completions.create(model="tiny", messages=say(text), tools=TOOLS, stream=True)
    first, second = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert first.id
    assert (first.type, first.function.name, first.function.arguments) == ("function", "get_time", "")
    assert (second.index, second.function.arguments) == (first.index, "{}")


def test_reasoning(client: openai.OpenAI) -> None:
    text = "<think>\nTwo and two.\n</think>\n\nFour."
    message = client.chat.completions.create(model="tiny", messages=say(text)).choices[0].message
    assert message.content == "Four."
    assert message.reasoning_content == message.reasoning == "Two and two."  # type: ignore[attr-defined]
    reasoning = content = ""
    for chunk in client.chat.completions.create(model="tiny", messages=say(text), stream=True):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", "") or ""
        content += delta.content or ""
    assert (reasoning, content) == ("Two and two.", "Four.")


def test_choices_logprobs_and_token_ids_go_on_working(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=say(CALL), tools=TOOLS, n=2, logprobs=True, extra_body={"return_token_ids": True}
    )
    for choice in answer.choices:
        assert choice.message.tool_calls
        assert choice.logprobs
        assert "".join(position.token for position in choice.logprobs.content or ()) == CALL
        assert choice.token_ids == list(range((len(CALL) + 2) // 3))  # type: ignore[attr-defined]


def test_what_reaches_the_engine(client: openai.OpenAI, thinker: FakeEngine) -> None:
    name: Any = {"type": "function", "function": {"name": "get_time"}}
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "How late?"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": f"say {json.dumps(TIME)}"},
        ],
        tools=TOOLS,
        tool_choice=name,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        extra_headers={"x-request-id": "named"},
    )
    request = thinker.wait_for_request("named")
    assert [tool["function"]["name"] for tool in json.loads(request.prompt.tools)] == ["get_weather", "get_time"]
    assert request.prompt.template_kwargs == b'{"enable_thinking":false}'
    assert request.prompt.messages[1].tool_calls[0].name == "get_time"
    assert request.params.shown_special_tokens == ("<tool_call>",)
    grammar = request.params.grammar
    assert grammar is not None
    assert "get_time" in grammar.source
    assert "get_weather" not in grammar.source


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(client: openai.OpenAI, thinker: FakeEngine, mode: Any) -> None:
    """OpenAI's form of it on chats, in the types of its client, behind a turn that was refused."""
    allowed: ChatCompletionAllowedToolChoiceParam = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_time"}}]},
    }
    refusal: ChatCompletionAssistantMessageParam = {
        "role": "assistant",
        "content": [{"type": "refusal", "refusal": "No."}],
    }
    answer = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{"role": "user", "content": "Pick a lock"}, refusal, *say(TIME)],
        tools=TOOLS,
        tool_choice=allowed,
        extra_headers={"x-request-id": f"allowed-{mode}"},
    )
    assert "x-tokenmill-ignored" not in answer.headers
    (call,) = answer.parse().choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_time"
    request = thinker.wait_for_request(f"allowed-{mode}")
    assert [tool["function"]["name"] for tool in json.loads(request.prompt.tools)] == ["get_time"]
    assert request.prompt.messages[1].content == "No."
    grammar = request.params.grammar
    assert (grammar is not None) == (mode == "required")
    assert grammar is None or "get_weather" not in grammar.source


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions"),
        ({"tools": [{"type": "function", "function": {"name": "no good"}}]}, "tools[0].function.name"),
        ({"extra_body": {"chat_template_kwargs": {"x": 1}}}, "chat_template_kwargs.x"),
    ],
)
def test_a_bad_parameter_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=say("x"), **fields)
    assert caught.value.param == param
