"""Chunks and whole answers built from the same outputs say the same, however the outputs arrive."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.generation import Batch
from frontend.protocol import PromptTokensDetails, Usage
from frontend.requests import Job
from frontend.responses import ChatResponder, CompletionResponder, Responder
from ipc.codec import pack_ints
from ipc.messages import (
    Delta,
    Finished,
    FinishReason,
    PositionLogprobs,
    SamplingParams,
    TextPrompt,
    TokenLogprob,
)

USAGE = Usage(1, 2, 3, PromptTokensDetails(0))


def position(data: bytes) -> PositionLogprobs:
    token = TokenLogprob(7, data.decode(errors="replace"), data, -0.25)
    return PositionLogprobs(token, (token, TokenLogprob(8, "z", b"z", float("-inf"))))


def delta(index: int, text: str, *, logprobs: bool) -> Delta:
    positions = (position(text.encode()),) if logprobs else ()
    return Delta(1, index, text, pack_ints([7]), positions)


def finished(index: int, reason: FinishReason) -> Finished:
    return Finished(1, index, reason, None, 1, 2, 0)


@st.composite
def outputs(draw: st.DrawFn, logprobs: bool) -> tuple[int, list[Batch]]:
    """What n choices get, interleaved, and cut into batches."""
    n = draw(st.integers(1, 3))
    texts = draw(st.lists(st.lists(st.text(max_size=4), max_size=5), min_size=n, max_size=n))
    queues: list[list[Delta | Finished]] = [
        [*(delta(index, text, logprobs=logprobs) for text in texts[index]), finished(index, "stop")]
        for index in range(n)
    ]
    batches: list[Batch] = [[]]
    while any(queues):
        index = draw(st.sampled_from([index for index in range(n) if queues[index]]))
        batches[-1].append((index, queues[index].pop(0)))
        if draw(st.booleans()):
            batches.append([])
    return n, [batch for batch in batches if batch]


def make(kind: type[Responder], n: int, *, logprobs: bool = False, echo: tuple[str, ...] = ()) -> Responder:
    params = SamplingParams(n=n, logprobs=2 if logprobs else None)
    return kind(Job((TextPrompt("p"),), params, "m", True, False, echo), "fp_1")


def events(data: bytes) -> list[dict[str, Any]]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("kind", [ChatResponder, CompletionResponder])
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_streamed_equals_whole(kind: type[Responder], logprobs: bool, data: st.DataObject) -> None:
    n, batches = data.draw(outputs(logprobs))
    chat = kind is ChatResponder
    echo = () if chat else ("echoed ",)
    whole = json.loads(make(kind, n, logprobs=logprobs, echo=echo).whole(batches, USAGE))
    responder = make(kind, n, logprobs=logprobs, echo=echo)
    chunks = [chunk for batch in batches for chunk in events(responder.chunks(batch))]
    for index, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        text = "".join((part["delta"].get("content", "") if chat else part["text"]) for part in mine)
        assert text == (choice["message"]["content"] if chat else choice["text"])
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        if chat:
            assert [part["delta"].get("role") for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
        if logprobs:
            for key, expected in choice["logprobs"].items():
                if expected is not None:
                    found = [entry for part in mine if part["logprobs"] for entry in part["logprobs"][key]]
                    assert found == expected
        else:
            assert choice["logprobs"] is None
            assert all(part["logprobs"] is None for part in mine)


@pytest.mark.parametrize("stop_reason", ["repetition_loop", 'a "stop"', 7, 0])
@pytest.mark.parametrize("kind", [ChatResponder, CompletionResponder])
def test_the_stop_reason_is_told_where_there_is_one(kind: type[Responder], stop_reason: str | int) -> None:
    batch: Batch = [
        (0, delta(0, "a", logprobs=False)),
        (0, Finished(1, 0, "stop", stop_reason, 1, 1, 0)),
        (1, delta(1, "b", logprobs=False)),
        (1, finished(1, "stop")),
    ]
    whole = json.loads(make(kind, 2).whole([batch], USAGE))["choices"]
    streamed = [chunk["choices"][0] for chunk in events(make(kind, 2).chunks(batch))]
    for choices in (whole, [choice for choice in streamed if choice["finish_reason"]]):
        assert choices[0]["stop_reason"] == stop_reason
        assert "stop_reason" not in choices[1]


def test_text_offsets_count_characters_not_bytes() -> None:
    responder = make(CompletionResponder, 1, logprobs=True)
    pieces = [b"a", b"\xc3", b"\xa9", "日本".encode(), b"\xf0\x9f", b"\x98\x80", b"b"]
    text = b"".join(pieces).decode()
    positions = tuple(position(piece) for piece in pieces)
    batch: Batch = [(0, Delta(1, 0, text, pack_ints([7] * 7), positions)), (0, finished(0, "stop"))]
    choice = json.loads(responder.whole([batch], USAGE))["choices"][0]
    # Starts of a, é (both its bytes), 日, 😀 (both its halves), b within the text "aé日本😀b".
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 4, 4, 5]
    assert choice["text"] == "aé日本😀b"


def test_minus_infinity_is_a_number_in_json() -> None:
    batch: Batch = [(0, delta(0, "a", logprobs=True)), (0, finished(0, "stop"))]
    chat = json.loads(make(ChatResponder, 1, logprobs=True).whole([batch], USAGE))
    assert chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] == -9999.0
    text = json.loads(make(CompletionResponder, 1, logprobs=True).whole([batch], USAGE))
    assert text["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.25, "z": -9999.0}]


def test_nothing_is_said_while_a_character_is_pending() -> None:
    responder = make(ChatResponder, 1)
    assert len(events(responder.chunks([(0, Delta(1, 0, "", pack_ints([1])))]))) == 1  # the role
    assert responder.chunks([(0, Delta(1, 0, "", pack_ints([2])))]) == b""
    assert events(responder.chunks([(0, delta(0, "é", logprobs=False))]))[0]["choices"][0]["delta"] == {"content": "é"}
