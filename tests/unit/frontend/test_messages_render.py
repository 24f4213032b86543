"""Outputs as Anthropic's messages: objects and events, against the types of Anthropic's own client."""

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from frontend.errors import ApiError
from frontend.messages_api.render import MessagesRenderer
from frontend.parsers import PlainParser
from frontend.pieces import OutputParser, Piece, Text, ToolArguments, ToolCallBegin
from frontend.requests import Job
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

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
JOB = Job((TextPrompt("p"),), SamplingParams(stop=("END",)), "m", True, False)
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


def make(parser: OutputParser) -> MessagesRenderer:
    return MessagesRenderer(JOB, Names({"stop": "stop_sequences"}), parser)


def check_blocks(events: list[dict[str, Any]], content: list[dict[str, Any]]) -> None:
    """Each block starts empty, grows by its deltas to what it is in the end, and stops before the next one starts."""
    at = 0
    for index, block in enumerate(content):
        start = events[at]
        assert start["type"] == "content_block_start"
        texts = []
        at += 1
        while events[at]["type"] == "content_block_delta":
            change = events[at]["delta"]
            assert events[at]["index"] == index
            assert change["type"] == DELTAS[block["type"]]
            texts.append(change[FIELDS[block["type"]]])
            at += 1
        assert events[at] == {"type": "content_block_stop", "index": index}
        at += 1
        text = "".join(texts)
        if block["type"] == "tool_use":
            assert json.loads(text) == block["input"]
            assert start["content_block"] == {**block, "input": {}}
        else:
            assert text == block[block["type"]]
            assert start["content_block"] == {**block, block["type"]: ""}
        assert start["index"] == index
    assert at == len(events)


def plain(content: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Kind and text (of a call: its arguments) of each block."""
    found: list[tuple[str, Any]] = []
    for block in content:
        if block["type"] == "tool_use":
            found.append((f"call {block['id']} {block['name']}", block["input"]))
        else:
            found.append(({"thinking": "reasoning"}.get(block["type"], "text"), block[block["type"]]))
    return found


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_events_tell_the_message(data: st.DataObject) -> None:
    script = data.draw(scripts())
    arrived = batches(data.draw, script, finished())
    renderer = make(Scripted(script))
    stream = b"".join(renderer.chunks(batch) for batch in arrived) + renderer.end(USAGE)
    events = events_of(stream)
    for event in events:
        if event["type"] != "ping":  # which the client drops before it looks at types
            assert EVENT.validate_python(event).type == event["type"]
    start, ping, *middle, change, stop = events
    assert (start["type"], ping, change["type"], stop["type"]) == (
        "message_start",
        {"type": "ping"},
        "message_delta",
        "message_stop",
    )
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == 10

    whole = json.loads(make(Scripted(script)).whole(arrived, USAGE))
    Message.model_validate(whole)
    check_blocks(middle, whole["content"])
    expected = [(kind, json.loads(text) if kind.startswith("call ") else text) for kind, text in blocks_of(script)]
    assert plain(whole["content"]) == expected
    called = any(kind.startswith("call ") for kind, _ in expected)
    assert whole["stop_reason"] == ("tool_use" if called else "end_turn")
    assert change["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    # Tokens read from the cache are counted apart from the other ones of the input.
    assert change["usage"] == whole["usage"]
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (6, 4)
    assert whole["usage"]["output_tokens"] == 6


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", 7, ("end_turn", None)),
        ("stop", "repetition_loop", ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_stop_reasons(reason: Any, stop_reason: Any, expected: tuple[str, str | None]) -> None:
    whole = json.loads(make(PlainParser()).whole([[(0, delta("a")), (0, finished(reason, stop_reason))]], USAGE))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert whole["content"] == [{"type": "text", "text": "a"}]


def test_arguments_that_were_cut_are_an_empty_object_in_a_whole_answer() -> None:
    script: list[list[Piece]] = [[Text("x"), ToolCallBegin(0, "c", "f")], [ToolArguments(0, '{"a": [1,')], []]
    whole = json.loads(make(Scripted(script)).whole([[(0, delta()), (0, delta()), (0, finished("length"))]], USAGE))
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][1] == {"type": "tool_use", "id": "c", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "overloaded_error"), (500, "api_error")],
)
def test_a_failure_in_mid_stream_is_anthropics_error_event(status: int, kind: str) -> None:
    renderer = make(PlainParser())
    renderer.chunks([(0, delta("begun"))])
    (event,) = events_of(renderer.error(ApiError(status, "stop is bad", param="stop")))
    assert event == {"type": "error", "error": {"type": kind, "message": "stop_sequences is bad"}}
