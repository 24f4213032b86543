"""A request's spans: their times, their names, and what they say."""

import time

import pytest

from frontend.errors import ApiError
from frontend.request_spans import SpanData, spans_of
from frontend.requests import Job
from frontend.timelines import RequestTimeline
from ipc.messages import ChoiceTimings, Finished, Grammar, GrammarKind, SamplingParams, TextPrompt, Timings

NOW = time.monotonic()


def end_of(index: int, **scheduler: float) -> Finished:
    times = ChoiceTimings(steps=4, preemptions=1, **scheduler)  # type: ignore[arg-type]
    timings = Timings(0.0, NOW + 0.01, NOW + 0.02, NOW + 3.5, times)
    return Finished(1, index % 2, "length" if index else "stop", None, 10, 5 + index, 8 - index, timings=timings)


WHOLE = {
    "queued": NOW + 0.03,
    "first_scheduled": NOW + 0.5,
    "first_token": NOW + 1.0,
    "last_token": NOW + 3.0,
}


def span(ends: dict[int, Finished], *, error: ApiError | None = None, **params: object) -> SpanData:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    job = Job((TextPrompt("a secret"),) * 2, sampling, "tiny", stream=True, include_usage=False)
    timeline = RequestTimeline("req-1", NOW, 2 * sampling.n, ends)
    timeline.first_output = NOW + 1.25
    if error is not None:
        timeline.fail(error)
    timeline.end("/v1/completions")
    return spans_of(timeline, job, "org/tiny")


def milliseconds(data: SpanData, of: SpanData) -> tuple[int, int]:
    """Of `data`, counted from the start of `of`."""
    return round((data.start - of.start) / 1e6), round((data.end - of.start) / 1e6)


def test_the_phases_of_each_choice_are_below_the_request() -> None:
    root = span({0: end_of(0, **WHOLE), 3: end_of(3, queued=NOW + 0.03, first_scheduled=NOW + 2.0)}, n=2)
    assert abs(root.start / 1e9 - (time.time() - (time.monotonic() - NOW))) < 0.1
    below = [(child.name, child.attributes["tokenmill.choice"], milliseconds(child, root)) for child in root.children]
    assert below == [
        ("tokenize", 0, (10, 20)),
        ("queue", 0, (30, 500)),
        ("prefill", 0, (500, 1000)),
        ("decode", 0, (1000, 3000)),
        ("tokenize", 3, (10, 20)),
        ("queue", 3, (30, 2000)),
    ]
    decode = root.children[3]
    assert (decode.attributes["tokenmill.steps"], decode.attributes["tokenmill.preemptions"]) == (4, 1)
    assert not root.children[0].children


def test_attributes_have_the_names_of_the_conventions() -> None:
    ends = {index: end_of(index, **WHOLE) for index in range(4)}
    attributes = dict(span(ends, n=2, max_tokens=7, temperature=0.5, top_k=20, seed=3).attributes)
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tokenmill",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "org/tiny",
        "gen_ai.output.type": "text",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 20.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["stop", "length", "length", "length"],
        "gen_ai.response.time_to_first_chunk": pytest.approx(1.25),
        "gen_ai.usage.input_tokens": 20,  # each prompt once
        "gen_ai.usage.output_tokens": 26,
        "gen_ai.usage.cache_read.input_tokens": 12,
        "tokenmill.request_id": "req-1",
        "http.route": "/v1/completions",
    }


@pytest.mark.parametrize(
    ("kind", "output"),
    [("json_object", "json"), ("json_schema", "json"), ("regex", "text"), ("choice", "text"), ("lark", "text")],
)
def test_only_a_grammar_of_json_makes_json(kind: GrammarKind, output: str) -> None:
    assert span({}, grammar=Grammar(kind, "")).attributes["gen_ai.output.type"] == output


def test_an_error_is_told_by_its_code_and_not_by_its_text() -> None:
    root = span({}, error=ApiError(429, "a secret", code="queue_full"))
    assert (root.error, root.attributes["error.type"], root.children) == ("429", "queue_full", ())
    assert "secret" not in repr(root)


def test_a_client_that_left_is_an_error_of_its_own() -> None:
    root = span({0: end_of(0, **WHOLE)})
    assert root.attributes["error.type"] == "client_gone"
    assert root.error
    assert span({0: end_of(0, **WHOLE), 1: end_of(1, **WHOLE)}).error == ""
