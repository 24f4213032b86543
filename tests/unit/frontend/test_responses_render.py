"""Outputs as responses: objects and events, against the types of OpenAI's own client."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from frontend.errors import ApiError
from frontend.parsers import PlainParser
from frontend.pieces import OutputParser, Piece, Reasoning, Text
from frontend.requests import Job
from frontend.responses_api.protocol import ResponsesRequest, responses_decoder
from frontend.responses_api.render import ResponsesRenderer
from frontend.translation import Names
from ipc.messages import SamplingParams, TextPrompt
from tests.unit.frontend.outputs import (
    USAGE,
    Scripted,
    batches,
    blocks_of,
    delta,
    events_of,
    finished,
    scripts,
)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
JOB = Job((TextPrompt("p"),), SamplingParams(temperature=0.5, top_p=0.25), "m", True, False)


def make(parser: OutputParser, **fields: Any) -> ResponsesRenderer:
    body: ResponsesRequest = responses_decoder.decode(json.dumps({"model": "m", "input": "hi", **fields}))
    return ResponsesRenderer(JOB, body, Names({"max_tokens": "max_output_tokens"}), parser)


def valid(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for event in events:
        assert EVENT.validate_python(event).type == event["type"]
    return events


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


def text_of(item: dict[str, Any]) -> tuple[str, str]:
    """Kind and text of an item, as `blocks_of` has them."""
    if item["type"] == "function_call":
        return f"call {item['call_id']} {item['name']}", item["arguments"]
    (part,) = item["content"]
    kind = {"message": "text", "reasoning": "reasoning"}[item["type"]]
    assert part["type"] == {"text": "output_text", "reasoning": "reasoning_text"}[kind]
    return kind, part["text"]


def check_items(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Each item is added, grows and is done before the next one, and its deltas are what it has in the end."""
    at = 0
    for index, item in enumerate(output):
        own = []
        while at < len(events) and events[at]["output_index"] == index:
            own.append(events[at])
            at += 1
        names = [event["type"].removeprefix("response.") for event in own]
        kind = {
            "message": "output_text",
            "reasoning": "reasoning_text",
            "function_call": "function_call_arguments",
        }[item["type"]]
        deltas = [event["delta"] for event in own if event["type"] == f"response.{kind}.delta"]
        middle = [f"{kind}.delta"] * len(deltas) + [f"{kind}.done"]
        if kind != "function_call_arguments":
            middle = ["content_part.added", *middle, "content_part.done"]
        assert names == ["output_item.added", *middle, "output_item.done"]
        assert "".join(deltas) == text_of(item)[1]
        assert {event["item_id"] for event in own[1:-1]} <= {item["id"]}
        assert own[0]["item"]["id"] == item["id"]
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1]["item"] == item
    assert at == len(events)


@given(data=st.data(), cut=st.booleans())
@settings(max_examples=100, deadline=None)
def test_events_tell_the_response(data: st.DataObject, cut: bool) -> None:
    script = data.draw(scripts())
    end = finished("length" if cut else "stop")
    arrived = batches(data.draw, script, end)
    renderer = make(Scripted(script))
    stream = b"".join(renderer.chunks(batch) for batch in arrived) + renderer.end(USAGE)
    events = valid(events_of(stream))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *middle, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["output"] == []
    assert last["type"] == ("response.incomplete" if cut else "response.completed")
    response = last["response"]
    check_items(middle, response["output"])
    assert [text_of(item) for item in response["output"]] == blocks_of(script)
    statuses = [item["status"] for item in response["output"]]
    assert statuses[:-1] == ["completed"] * len(statuses[:-1])
    assert statuses[-1:] in ([], ["incomplete" if cut else "completed"])
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)

    whole = json.loads(make(Scripted(script)).whole(arrived, USAGE))
    Response.model_validate(whole)
    own = {"id", "output", "created_at", "completed_at"}
    assert {name: whole[name] for name in whole if name not in own} == {
        name: response[name] for name in response if name not in own
    }
    assert list(map(without_ids, whole["output"])) == list(map(without_ids, response["output"]))


def test_a_response_has_what_was_asked_and_what_was_used() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    renderer = make(
        PlainParser(),
        instructions="be kind",
        max_output_tokens=9,
        metadata={"a": "b"},
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_object"}},
        user="me",
    )
    response = Response.model_validate_json(renderer.whole([[(0, delta("hello")), (0, finished())]], USAGE))
    assert response.output_text == "hello"
    assert (response.model, response.instructions, response.max_output_tokens) == ("m", "be kind", 9)
    assert (response.temperature, response.top_p) == (0.5, 0.25)
    assert (response.metadata, response.user) == ({"a": "b"}, "me")
    assert response.tools[0].to_dict() == {**tool, "description": None, "strict": None}
    assert response.tool_choice.to_dict() == {"type": "function", "name": "f"}  # type: ignore[union-attr]
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_object"
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (10, 6, 16)
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_reasoning_tokens_are_those_that_brought_only_reasoning() -> None:
    script: list[list[Piece]] = [[Reasoning("a")], [Reasoning("b"), Text("c")], [], [Text("d")], []]
    renderer = make(Scripted(script))
    whole = json.loads(renderer.whole([[(0, delta()) for _ in script[:-1]], [(0, finished())]], USAGE))
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 1


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (503, "server_error")]
)
def test_a_failure_in_mid_stream_ends_the_open_item_and_the_response(status: int, code: str) -> None:
    renderer = make(PlainParser())
    stream = renderer.chunks([(0, delta("begun"))])
    stream += renderer.error(ApiError(status, "max_tokens is too many", param="max_tokens"))
    events = valid(events_of(stream))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": code, "message": "max_output_tokens is too many"}
    check_items(events[2:-1], response["output"])
    assert response["output"][0]["status"] == "incomplete"


def test_a_failure_before_any_output_is_an_error_event() -> None:
    error = ApiError(429, "full", code="queue_full")
    (event,) = valid(events_of(make(PlainParser()).error(error)))
    assert event == {"type": "error", "sequence_number": 0, "code": "queue_full", "message": "full", "param": None}
