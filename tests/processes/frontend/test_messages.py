"""/v1/messages under the official anthropic client."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from ..fake_engine import CACHED, FakeEngine, expected_text
from .process import Frontend

PATH = "/v1/messages"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def ask(line: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": line}], **fields}


@pytest.fixture(scope="module")
def client(frontend: Frontend) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{frontend.port}", api_key="none", max_retries=0) as client:
        yield client


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**ask(), extra_headers={"x-request-id": "a-message"})
    Message.model_validate(answer.to_dict())
    assert answer.id.startswith("msg_")
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "tiny", "end_turn")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": expected_text(0, 8)}]
    # The 5 tokens of the prompt: those from the cache are not among the input tokens.
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (5 - CACHED, CACHED)
    assert answer.usage.output_tokens == 8
    assert answer._request_id == "a-message"


def test_the_length_limit(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**ask(max_tokens=3))
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)


def test_the_stream_helper_ends_with_the_same_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ask()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**ask())
    assert final.to_dict(exclude_none=True) | {"id": whole.id} == whole.to_dict(exclude_none=True)
    assert text == expected_text(0, 8)


def test_every_event_is_of_the_clients_types(frontend: Frontend) -> None:
    answer = frontend.request("POST", PATH, ask(max_tokens=4, stream=True))
    parts = answer.body.decode().split("\n\n")
    assert parts.pop() == ""
    names = []
    for part in parts:
        name, _, data = part.partition("\ndata: ")
        event = json.loads(data)
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENT.validate_python(event)
        names.append(event["type"])
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_the_request_reaches_the_engine(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    client.messages.create(
        **ask(),
        system=[{"type": "text", "text": "be kind"}],
        stop_sequences=["STOP"],
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 3},
        extra_headers={"x-request-id": "all-fields"},
    )
    request = engine.wait_for_request("all-fields")
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (100, 0.5, 0.25, 3)
    assert params.stop == ("STOP",)
    turns = [(turn.role, turn.content) for turn in request.prompt.messages]  # type: ignore[union-attr]
    assert turns == [("system", "be kind"), ("user", "hello")]
    assert request.tenant == hashlib.sha256(b"none").hexdigest()[:16]  # of the client's x-api-key


def test_ignored_fields_are_named(client: anthropic.Anthropic) -> None:
    answer = client.messages.with_raw_response.create(
        **ask(), thinking={"type": "enabled", "budget_tokens": 1024}, service_tier="auto"
    )
    assert answer.headers["x-tokenmill-ignored"] == "service_tier,thinking"


def test_a_last_turn_of_the_assistant_is_continued(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    client.messages.create(
        **ask() | {"messages": [*HELLO, {"role": "assistant", "content": "Well,"}]},
        extra_headers={"x-request-id": "prefilled"},
    )
    prompt = engine.wait_for_request("prefilled").prompt
    assert prompt.continue_final_message  # type: ignore[union-attr]
    assert not prompt.add_generation_prompt  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 500}, "max_tokens"),
        ({"messages": []}, "messages must not be empty"),
        ({"extra_body": {"temperature": 1.5}}, "temperature must be between 0 and 1"),
        ({"stop_sequences": [""]}, "each stop string"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences may have at most 16"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages[0].content[0]: only blocks of type text and tool_result are supported here, not 'image'",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_400_says_what_is_wrong(
    client: anthropic.Anthropic, fields: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**(ask(stream=stream) | fields))
    assert caught.value.type == "invalid_request_error"
    assert words in str(caught.value.api_message)


def test_errors_have_the_clients_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ask() | {"model": "gpt-9"}, extra_headers={"x-request-id": "no-model"})
    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "the model 'gpt-9' is not served here; served: tiny, org/tiny"},
        "request_id": "no-model",
    }
    assert missing.value.request_id == "no-model"
    for stream in (False, True):
        with pytest.raises(anthropic.RateLimitError) as full:
            client.messages.create(**ask("refuse", stream=stream))
        assert full.value.type == "rate_limit_error"
        assert full.value.response.headers["retry-after"] == "3"
    with pytest.raises(anthropic.OverloadedError) as died:
        client.messages.create(**ask("fail"))
    assert died.value.type == "overloaded_error"
    with pytest.raises(anthropic.NotFoundError) as nowhere:
        client.messages.batches.list()
    assert nowhere.value.type == "not_found_error"
    with pytest.raises(anthropic.ContentTooLargeError):
        client.messages.create(**ask("x" * (1 << 20)))


def test_a_failure_in_mid_stream_is_raised(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="the engine died") as caught:
        list(client.messages.create(**ask("fail", stream=True)))
    assert caught.value.type == "overloaded_error"


def test_silent_streams_get_pings(talkative: Frontend, engine: FakeEngine) -> None:
    connection = talkative.connect()
    connection.request("POST", PATH, json.dumps(ask("mute", stream=True)), {"x-request-id": "silent-message"})
    response = connection.getresponse()
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    data = b""
    while data.count(ping) < 2:
        data += response.read1(65536)
    assert data == ping * data.count(ping)
    engine.go_on(engine.wait_for_request("silent-message"), "")
    data += response.read()
    connection.close()
    assert data.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    """The fake engine has a token for each character; the real one's count is that of the usage (tests/e2e)."""
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, system="be kind")
    assert counted.input_tokens == len("system: be kind\nuser: hello\nassistant:")
    with pytest.raises(anthropic.BadRequestError, match="messages must not be empty"):
        client.messages.count_tokens(model="tiny", messages=[])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="gpt-9", messages=HELLO)
