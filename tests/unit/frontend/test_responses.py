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
    PromptInfo,
    PromptPosition,
    SamplingParams,
    TextPrompt,
    TokenLogprob,
)

USAGE = Usage(1, 2, 3, PromptTokensDetails(0))


def token(text: str, logprob: float, token_id: int = 7) -> TokenLogprob:
    return TokenLogprob(token_id, text, text.encode(), logprob)


def position(data: bytes, offset: int = 0) -> PositionLogprobs:
    token = TokenLogprob(7, data.decode(errors="replace"), data, -0.25)
    return PositionLogprobs(token, (token, TokenLogprob(8, "z", b"z", float("-inf"))), offset)


def delta(index: int, text: str, *, logprobs: bool) -> Delta:
    positions = (position(text.encode()),) if logprobs else ()
    return Delta(1, index, text, pack_ints([7]), positions)


def finished(index: int, reason: FinishReason) -> Finished:
    return Finished(1, index, reason, None, 1, 2, 0)


PROMPT = PromptInfo(
    1,
    pack_ints([4, 5, 6]),
    "échoed ",
    pack_ints([0, 2, 6]),
    "éc",
    (
        PromptPosition(token("hoed", -2.0), 7, (token("x", -0.5, 10), token("y", -1.0, 11), token("z", -1.5, 12))),
        PromptPosition(token(" ", -0.5), 1, (token(" ", -0.5), token("y", -1.0, 11), token("z", -1.5, 12))),
    ),
)


LISTED = [
    None,
    {
        "7": {"logprob": -2.0, "rank": 7, "decoded_token": "hoed"},
        "10": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
    },
    {"7": {"logprob": -0.5, "rank": 1, "decoded_token": " "}},
]


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


def make(kind: type[Responder], n: int, *, logprobs: bool = False, echo: bool = False) -> Responder:
    params = SamplingParams(n=n, logprobs=2 if logprobs else None, prompt_logprobs=3 if logprobs else None)
    job = Job((TextPrompt("p"),), params, "m", True, False, echo, prompt_logprobs=1 if logprobs else None)
    responder = kind(job, "fp_1")
    responder.prompt_of = lambda index: PROMPT
    return responder


def events(data: bytes) -> list[dict[str, Any]]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("kind", [ChatResponder, CompletionResponder])
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_streamed_equals_whole(kind: type[Responder], logprobs: bool, data: st.DataObject) -> None:
    """B018: also the alternatives of each of several tokens in one chunk."""
    n, batches = data.draw(outputs(logprobs))
    chat = kind is ChatResponder
    echo = not chat
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
                assert whole["prompt_logprobs"] == LISTED
                assert all(
                    chunk["prompt_logprobs"] == LISTED for chunk in chunks if "role" in chunk["choices"][0]["delta"]
                )
        elif logprobs:
            assert choice["prompt_logprobs"] == mine[0]["prompt_logprobs"] == LISTED
            assert choice["logprobs"]["tokens"][:3] == ["éc", "hoed", " "]
            assert choice["text"].startswith("échoed ")
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


def test_echo_with_logprobs_is_one_list_over_prompt_and_output() -> None:
    batch: Batch = [
        (0, Delta(1, 0, "ab", pack_ints([7, 7]), (position(b"a"), position(b"b", 1)))),
        (0, finished(0, "stop")),
    ]
    choice = json.loads(make(CompletionResponder, 1, logprobs=True, echo=True).whole([batch], USAGE))["choices"][0]
    assert choice["text"] == "échoed ab"
    assert choice["logprobs"] == {
        "tokens": ["éc", "hoed", " ", "a", "b"],
        "token_logprobs": [None, -2.0, -0.5, -0.25, -0.25],
        "top_logprobs": [
            None,
            {"x": -0.5, "y": -1.0, "hoed": -2.0},
            {" ": -0.5, "y": -1.0},
            {"a": -0.25, "z": -9999.0},
            {"b": -0.25, "z": -9999.0},
        ],
        "text_offset": [0, 2, 6, 7, 8],
    }


def test_scoring_alone_streams_the_prompt_and_its_end() -> None:
    responder = make(CompletionResponder, 1, logprobs=True, echo=True)
    chunks = [chunk["choices"][0] for chunk in events(responder.chunks([(0, finished(0, "length"))]))]
    assert [chunk["text"] for chunk in chunks] == ["échoed ", ""]
    assert chunks[0]["logprobs"]["token_logprobs"] == [None, -2.0, -0.5]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, "length"]


@pytest.mark.parametrize("prompt_too", [True, False])
@pytest.mark.parametrize("kind", [ChatResponder, CompletionResponder])
def test_token_ids_of_prompt_and_output(kind: type[Responder], prompt_too: bool) -> None:
    """vLLM's places: those of the prompt in a chat's answer and first chunk, in the choice of a completion. Without
    them the engine is not asked for the prompt either, and so tells none."""
    batches: list[Batch] = [[(0, delta(0, "a", logprobs=False))], [(0, finished(0, "stop"))]]

    def made() -> Responder:
        prompts = (TextPrompt("p"),)
        job = Job(
            prompts, SamplingParams(), "m", True, False, return_token_ids=True, return_prompt_token_ids=prompt_too
        )
        responder = kind(job, "fp_1")
        if prompt_too:
            responder.prompt_of = lambda index: PROMPT
        return responder

    whole = json.loads(made().whole(batches, USAGE))
    responder = made()
    chunks = [chunk for batch in batches for chunk in events(responder.chunks(batch))]
    # What comes before the first token: of a completion nothing, unless something is to be said of the prompt.
    assert len(chunks) == (3 if prompt_too or kind is ChatResponder else 2)
    first, second, last = chunks[0], *chunks[-2:]
    place, chunk_place = (whole, first) if kind is ChatResponder else (whole["choices"][0], first["choices"][0])
    assert place.get("prompt_token_ids") == chunk_place.get("prompt_token_ids") == ([4, 5, 6] if prompt_too else None)
    assert whole["choices"][0]["token_ids"] == second["choices"][0]["token_ids"] == [7]
    assert "prompt_token_ids" not in json.dumps([second, last])
    assert "prompt_logprobs" not in whole
