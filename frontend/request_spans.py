"""A request's way as spans, with the attributes of OpenTelemetry's conventions for generative AI.

https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai/gen-ai-spans.md, whose state is "development".
What they have no name for begins with `tokenmill.`. Nothing of prompts or outputs is in them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ipc.messages import Finished, SamplingParams

from .requests import Job
from .timelines import RequestTimeline, clock_offset

Attribute = str | int | float | bool | list[str]


@dataclass(frozen=True)
class SpanData:
    """One span; times in nanoseconds of Unix time."""

    name: str
    start: int
    end: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""  # empty: there was none
    children: tuple["SpanData", ...] = ()


def spans_of(timeline: RequestTimeline, job: Job, served_name: str) -> SpanData:
    """The span of a request that has ended, with those of its choices' phases below it."""
    ends = timeline.ends
    operation = "text_completion" if timeline.route == "/v1/completions" else "chat"
    grammar = job.params.grammar
    is_json = grammar is not None and grammar.kind in ("json_object", "json_schema")
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tokenmill",
        "gen_ai.request.model": job.model,
        "gen_ai.response.model": served_name,
        "gen_ai.output.type": "json" if is_json else "text",
        "tokenmill.request_id": timeline.request_id,
        "http.route": timeline.route,
        **_asked(job.params, stream=job.stream),
    }
    if ends:
        n = job.params.n
        prompts = {index // n: end for index, end in ends.items()}
        attributes |= {
            "gen_ai.response.finish_reasons": [end.reason for _, end in sorted(ends.items())],
            "gen_ai.usage.input_tokens": sum(end.prompt_tokens for end in prompts.values()),
            "gen_ai.usage.output_tokens": sum(end.completion_tokens for end in ends.values()),
            "gen_ai.usage.cache_read.input_tokens": sum(
                min(end.cached_tokens for index, end in ends.items() if index // n == prompt) for prompt in prompts
            ),
        }
    if job.stream and timeline.first_output:
        attributes["gen_ai.response.time_to_first_chunk"] = timeline.first_output - timeline.arrival
    problem = ""
    if (error := timeline.error) is not None:
        attributes["error.type"] = error.code or str(error.status)
        problem = str(error.status)
    elif timeline.status == "aborted":
        attributes["error.type"], problem = "client_gone", "the client left"
    return SpanData(
        f"{operation} {job.model}",
        _unix(timeline.arrival),
        _unix(timeline.ended),
        attributes,
        problem,
        tuple(span for index, end in sorted(ends.items()) for span in _phases(index, end)),
    )


def _asked(params: SamplingParams, *, stream: bool) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if params.top_k > 0:
        attributes["gen_ai.request.top_k"] = float(params.top_k)
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    if params.n != 1:
        attributes["gen_ai.request.choice.count"] = params.n
    if stream:
        attributes["gen_ai.request.stream"] = True
    return attributes


def _phases(index: int, end: Finished) -> Iterator[SpanData]:
    """What a choice did one after the other; a phase that it never came to is left out."""
    told = end.timings
    if told is None:
        return
    times = told.scheduler
    choice: dict[str, Attribute] = {"tokenmill.choice": index}
    prefill: dict[str, Attribute] = {
        "tokenmill.prompt_tokens": end.prompt_tokens,
        "tokenmill.cached_tokens": end.cached_tokens,
    }
    decode: dict[str, Attribute] = {
        "tokenmill.output_tokens": end.completion_tokens,
        "tokenmill.steps": times.steps,
        "tokenmill.preemptions": times.preemptions,
    }
    for name, start, finish, attributes in (
        ("tokenize", told.received, told.tokenized, {}),
        ("queue", times.queued, times.first_scheduled, {}),
        ("prefill", times.first_scheduled, times.first_token, prefill),
        ("decode", times.first_token, times.last_token, decode),
    ):
        if start and finish:
            yield SpanData(name, _unix(start), _unix(finish), {**choice, **attributes})


def _unix(monotonic: float) -> int:
    return int((monotonic + clock_offset()) * 1e9)
