"""The frontend under the official openai client."""

import hashlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ..fake_engine import CACHED, MODEL, MOST_TOKENS, FakeEngine, expected_text
from .process import Frontend

USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def client(frontend: Frontend) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{frontend.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == list(MODEL.names)
    assert client.models.retrieve("org/tiny").created == MODEL.created
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[USER], max_tokens=5)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected_text(0, 5)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5, 10)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == CACHED


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_b036_n_choices_without_stream(client: openai.OpenAI, n: int) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[USER], max_tokens=6, n=n)
    assert [choice.index for choice in answer.choices] == list(range(n))
    for choice in answer.choices:
        assert choice.message.content == expected_text(choice.index, 6)
        assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6 * n)


@pytest.mark.parametrize(("max_tokens", "reason"), [(5, "length"), (MOST_TOKENS, "length"), (100, "stop")])
def test_b041_the_engines_reason_is_told(client: openai.OpenAI, max_tokens: int, reason: str) -> None:
    ask = {"model": "tiny", "messages": [USER], "max_tokens": max_tokens}
    assert client.chat.completions.create(**ask).choices[0].finish_reason == reason
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[-1].choices[0].finish_reason == reason


def test_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=[USER], max_tokens=5, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected_text(0, 5)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("include", [None, False, True])
def test_b039_usage_only_when_asked(client: openai.OpenAI, include: bool | None) -> None:
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    chat = client.chat.completions.create(model="tiny", messages=[USER], max_tokens=4, stream=True, **options)
    completion = client.completions.create(model="tiny", prompt="hello", max_tokens=4, stream=True, **options)
    for chunks in (list(chat), list(completion)):
        if include:
            assert chunks[-1].choices == []
            usage = chunks.pop().usage
            assert usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 4, 9)
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "bcd"], n=2, max_tokens=3, echo=True)
    texts = [expected_text(0, 3), expected_text(1, 3)]
    assert [choice.text for choice in answer.choices] == [
        "a" + texts[0],
        "a" + texts[1],
        "bcd" + texts[0],
        "bcd" + texts[1],
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1 + 3, 4 * 3)

    streamed = ["", "", "", ""]
    ends = []
    for chunk in client.completions.create(
        model="tiny", prompt=["a", "bcd"], n=2, max_tokens=3, echo=True, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert streamed == [choice.text for choice in answer.choices]
    assert sorted(ends) == [0, 1, 2, 3]


def test_token_ids_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="tiny", prompt=[1, 2, 999], max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.object == "text_completion"


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="tiny", messages=[USER], max_tokens=3, logprobs=True, top_logprobs=2)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(position.token for position in logprobs.content) == chat.choices[0].message.content
    for position in logprobs.content:
        assert bytes(position.bytes or []).decode() == position.token
        assert position.logprob == -0.5
        assert [top.token for top in position.top_logprobs] == ["other0", "other1"]
        assert position.top_logprobs[0].logprob == -9999.0  # minus infinity, as OpenAI writes it

    text = client.completions.create(model="tiny", prompt="x", max_tokens=3, logprobs=1)
    old = text.choices[0].logprobs
    assert old is not None
    assert old.tokens is not None
    assert old.text_offset is not None
    assert [
        text.choices[0].text[at:].startswith(token) for at, token in zip(old.text_offset, old.tokens, strict=True)
    ] == [True] * 3
    assert old.token_logprobs == [-0.5] * 3


def test_streamed_logprobs_equal_the_whole_ones(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "max_tokens": 4}
    whole = client.chat.completions.create(**ask, messages=[USER], logprobs=True, top_logprobs=1).choices[0].logprobs
    parts = []
    for chunk in client.chat.completions.create(**ask, messages=[USER], logprobs=True, top_logprobs=1, stream=True):
        if chunk.choices[0].logprobs is not None:
            parts += chunk.choices[0].logprobs.content or []
    assert whole is not None
    assert parts == whole.content
    offsets = []
    for chunk in client.completions.create(**ask, prompt="x", logprobs=0, stream=True):
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == [5 * position for position in range(4)]


TENANT = hashlib.sha256(b"none").hexdigest()[:16]  # of the fixture's API key
EXTRA = [
    ({"priority": -1_000_000}, {"priority": -1_000_000}),
    ({"priority": 1_000_000}, {"priority": 1_000_000}),
    ({"ttft_target_ms": 1}, {"ttft_target_ms": 1.0}),
    ({"ttft_target_ms": 3_600_000}, {"ttft_target_ms": 3_600_000.0}),
    ({"cache_pin_seconds": 0.5}, {"cache_pin_seconds": 0.5}),
    ({"cache_pin_seconds": 3600}, {"cache_pin_seconds": 3600.0}),
    ({"cache_salt": "s" * 256}, {"namespace": f"{TENANT}:{hashlib.sha256(b's' * 256).hexdigest()[:48]}"}),
    ({"stop_on_loop": 2}, {"stop_on_loop": 2}),
    ({"stop_on_loop": 1000}, {"stop_on_loop": 1000}),
    ({"stop_on_loop": 0}, {"stop_on_loop": 0}),
]
DEFAULTS = {
    "tenant": TENANT,
    "namespace": TENANT,
    "priority": 0,
    "ttft_target_ms": None,
    "cache_pin_seconds": 0.0,
    "stop_on_loop": None,
}


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        (dict.fromkeys(["priority", "ttft_target_ms", "cache_pin_seconds", "cache_salt", "stop_on_loop"]), {}),
        *EXTRA,
    ],
    ids=lambda fields: "-".join(map(str, fields))[:40],
)
def test_each_extra_field_reaches_the_engine(
    client: openai.OpenAI, engine: FakeEngine, chat: bool, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    name = f"extra-{chat}-{len(engine.requests)}"
    ask: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 2,
        "extra_body": body,
        "extra_headers": {"x-request-id": name},
    }
    if chat:
        answer = client.chat.completions.with_raw_response.create(messages=[USER], **ask)
    else:
        answer = client.completions.with_raw_response.create(prompt="hello", **ask)
    assert "x-tokenmill-ignored" not in answer.headers
    request = engine.wait_for_request(name)
    got = {field: getattr(request, field) for field in DEFAULTS if field != "stop_on_loop"}
    assert got | {"stop_on_loop": request.params.stop_on_loop} == DEFAULTS | expected


def test_a_loop_is_told_as_the_reason_and_its_text_is_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "loop"}]).choices[0]
    assert (whole.message.content, whole.finish_reason) == (expected_text(0, 2), "stop")
    assert whole.model_extra == {"stop_reason": "repetition_loop"}
    chunks = [chunk.choices[0] for chunk in client.completions.create(model="tiny", prompt="loop", stream=True)]
    assert "".join(choice.text for choice in chunks) == expected_text(0, 2)
    assert chunks[-1].finish_reason == "stop"
    reasons = [(choice.model_extra or {}).get("stop_reason") for choice in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["repetition_loop"]


def test_a_400_names_the_parameter(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=[USER], temperature=3, stream=stream)
        assert caught.value.param == "temperature"
        assert "between 0 and 2" in caught.value.message


def test_errors_have_the_clients_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found"
    for stream in (False, True):
        for line, code, seconds in (("refuse", "queue_full", "3"), ("late", "ttft_target", "1")):
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(model="tiny", prompt=line, stream=stream)
            assert full.value.response.headers["retry-after"] == seconds, "rounded up to whole seconds"
            assert (full.value.code, full.value.type) == (code, "rate_limit_error")
    with pytest.raises(openai.InternalServerError) as died:
        client.completions.create(model="tiny", prompt="fail")
    assert died.value.status_code == 503


def test_a_failure_in_mid_stream_is_raised(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt="fail", stream=True)
    assert next(stream).choices[0].text == "begun"
    with pytest.raises(openai.APIError, match="the engine died"):
        next(stream)
