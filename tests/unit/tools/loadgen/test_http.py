"""What counts as a token in OpenAI's events, and what an answer amounts to."""

import json
from typing import Any

import pytest

from tools.loadgen.answer import Answer
from tools.loadgen.http import take_event

FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def answer_of(*events: Any, done: bool = True, by_usage: bool = False) -> Answer:
    answer = Answer()
    for at, event in enumerate(events):
        if take_event(json.dumps(event).encode(), float(at), answer, by_usage=by_usage):
            return answer
    if done:
        take_event(b"[DONE]", 99.0, answer)
    return answer


def delta(**fields: Any) -> Any:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


@pytest.mark.parametrize(
    ("event", "is_token"),
    [
        (delta(role="assistant"), False),
        (delta(role="assistant", content=""), False),
        (delta(content=None), False),
        (delta(content=" "), True),
        (delta(reasoning_content="hm"), True),
        (delta(reasoning="hm"), True),
        (delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]), True),
        ({"choices": [{"index": 0, "text": "x"}]}, True),
        ({"choices": [{"index": 0, "text": ""}]}, False),
        ({"choices": [{"index": 0, "text": "", "token_ids": [5]}]}, True),  # a part of a character
        ({"choices": [{"index": 0, "text": "", "token_ids": []}]}, False),
        ({"choices": [], "usage": None}, False),
    ],
    ids=str,
)
def test_a_token_is_text_of_any_kind_or_an_id(event: Any, is_token: bool) -> None:
    assert bool(answer_of(event).times) == is_token


def test_times_are_those_of_chunks_with_tokens() -> None:
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}}
    answer = answer_of(delta(role="assistant"), delta(content="a"), delta(content="b"), FINISH, usage)
    assert answer.times == [1.0, 2.0]
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 2, 1)
    assert answer.outcome() == ("ok", "")
    assert not answer.counted


def counted(event: Any, tokens: int) -> Any:
    """With the usage so far."""
    return event | {"usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def test_tokens_of_a_chunk_are_what_the_usage_has_grown_by() -> None:
    """As vLLM tells it; a chunk without text may have tokens, and one with text none."""
    answer = answer_of(
        counted(delta(role="assistant", content=""), 0),
        counted(delta(content="abc"), 3),
        counted(delta(content=""), 4),
        counted(delta(content="d"), 4),
        counted(delta(content="e"), 5),
        counted(FINISH, 5),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}},
        by_usage=True,
    )
    assert (answer.times, answer.tokens, answer.counted) == ([1.0, 2.0, 4.0], [3, 1, 1], True)
    assert answer.completion_tokens == 5
    assert answer.outcome() == ("ok", "")


@pytest.mark.parametrize("by_usage", [True, False])
def test_usage_at_the_end_alone_is_of_no_chunk(by_usage: bool) -> None:
    """Of a server that does not know of usage in each chunk, or was not asked for it."""
    answer = answer_of(delta(content="abc"), delta(content="d"), counted(FINISH, 5), by_usage=by_usage)
    assert (answer.times, answer.tokens, answer.counted) == ([0.0, 1.0], [1, 1], False)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (answer_of(delta(content="a"), FINISH), "ok"),
        (answer_of(delta(content="a"), FINISH, done=False), "truncated"),
        (answer_of(delta(content="a")), "truncated"),
        (answer_of(), "empty"),
        (answer_of(FINISH), "empty"),
        (answer_of(delta(content="a"), {"error": {"message": "gone"}}), "error"),
        (answer_of(delta(content="a"), {"error": "gone"}), "error"),
    ],
)
def test_outcomes(answer: Answer, outcome: str) -> None:
    assert answer.outcome()[0] == outcome


def test_only_a_timeline_of_ours_is_kept() -> None:
    assert answer_of(delta(content="a") | {"timings": {"prompt_ms": 5.0}}).timings is None
    assert answer_of(delta(content="a") | {"timings": {"choices": []}}).timings == {"choices": []}
