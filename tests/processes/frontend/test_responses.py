"""/v1/responses under the official openai client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ..fake_engine import CACHED, FakeEngine, expected_text
from .process import Frontend

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def client(frontend: Frontend) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{frontend.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hello", max_output_tokens=100, metadata={"a": "b"})
    Response.model_validate(answer.to_dict())
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details, answer.metadata) == ("completed", None, {"a": "b"})
    assert answer.output_text == expected_text(0, 8)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (5, 8, 13)
    assert answer.usage.input_tokens_details.cached_tokens == CACHED


def test_the_length_limit_leaves_it_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hello", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == expected_text(0, 3)
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_the_stream_helper_ends_with_the_same_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hello", instructions="be kind", max_output_tokens=100) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text == expected_text(0, 8)
    assert final.status == "completed"
    assert (final.instructions, final.store) == ("be kind", False)


def test_every_event_is_of_the_clients_types(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="tiny", input="hello", max_output_tokens=4, stream=True))
    names = [EVENT.validate_python(event.to_dict()).type.removeprefix("response.") for event in events]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 4,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_conversation_goes_on_with_the_output_of_before(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model="tiny", input="hello", max_output_tokens=2)
    conversation: Any = [{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "go on"}]
    answer = client.responses.with_raw_response.create(
        model="tiny", input=conversation, max_output_tokens=2, extra_headers={"x-request-id": "second-turn"}
    )
    assert "x-tokenmill-ignored" not in answer.headers
    prompt = engine.wait_for_request("second-turn").prompt
    assert [(turn.role, turn.content) for turn in prompt.messages] == [  # type: ignore[union-attr]
        ("user", "hello"),
        ("assistant", expected_text(0, 2)),
        ("user", "go on"),
    ]


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    answer = client.responses.with_raw_response.create(model="tiny", input="hello", store=True)
    assert answer.headers["x-tokenmill-ignored"] == "store"
    response = answer.parse()
    assert response.store is False  # type: ignore[attr-defined]
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            call(response.id)
    with pytest.raises(openai.BadRequestError, match="not stored") as caught:
        client.responses.create(model="tiny", input="go on", previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_400_names_the_parameter_as_it_was_sent(
    client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "hello", "stream": stream, **fields})
    assert caught.value.param == param
    assert param in caught.value.message


def test_errors_have_the_clients_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt-9", input="x")
    assert missing.value.code == "model_not_found"
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="tiny", input="refuse", stream=stream)
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="tiny", input="fail")


def test_a_failure_in_mid_stream_is_a_failed_response(client: openai.OpenAI, frontend: Frontend) -> None:
    events = list(client.responses.create(model="tiny", input="fail", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "the engine died")
    assert last.response.output_text == "begun"


def test_a_refusal_behind_a_comment_is_an_error_event(talkative: Frontend, engine: FakeEngine) -> None:
    connection = talkative.connect()
    body = {"model": "tiny", "input": "mute", "stream": True}
    connection.request("POST", PATH, json.dumps(body), {"x-request-id": "late-response"})
    response = connection.getresponse()
    data = b""
    while b": keep-alive\n\n" not in data:
        data += response.read1(65536)
    engine.go_on(engine.wait_for_request("late-response"), "refuse")
    data += response.read()
    connection.close()
    name, _, event = data.decode().removesuffix("\n\n").rpartition("\n\n")[2].partition("\ndata: ")
    assert name == "event: error"
    assert EVENT.validate_python(json.loads(event)).code == "queue_full"


def test_tokens_are_counted(client: openai.OpenAI) -> None:
    """The fake engine has a token for each character; the real one's count is that of the usage (tests/e2e)."""
    counted = client.responses.input_tokens.count(model="tiny", input="hello", instructions="be kind")
    assert counted.input_tokens == len("system: be kind\nuser: hello\nassistant:")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(model="tiny", input=[])
    assert caught.value.param == "input"
