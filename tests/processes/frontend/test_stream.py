"""The stream contract, on the wire."""

import contextlib
import http.client
import json
import random
import socket
from typing import Any

import pytest

from ..fake_engine import FakeEngine, expected_text
from .process import Answer, Frontend

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat_body(line: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": line}], "max_tokens": 4, **fields}


def text_body(line: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": line, "max_tokens": 4, **fields}


def check_chunk(chunk: dict[str, Any], chat: bool, usage: bool) -> None:
    """One chunk against OpenAI's schema: keys, types, and null where there is nothing."""
    keys = {"id", "object", "created", "model", "system_fingerprint", "choices"}
    assert set(chunk) == (keys | {"usage"} if usage else keys)
    assert chunk["object"] == ("chat.completion.chunk" if chat else "text_completion")
    assert isinstance(chunk["created"], int)
    for choice in chunk["choices"]:
        assert set(choice) == {"index", "delta" if chat else "text", "logprobs", "finish_reason"}
        assert choice["finish_reason"] in (None, "stop", "length")
        assert isinstance(choice["index"], int)
        if chat:
            assert set(choice["delta"]) <= {"role", "content"}
            assert all(isinstance(value, str) for value in choice["delta"].values())
        else:
            assert isinstance(choice["text"], str)


def chunks_of(answer: Answer, *, chat: bool, usage: bool = False) -> list[dict[str, Any]]:
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = answer.events()
    assert events.pop() == "[DONE]"
    assert "[DONE]" not in events
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events]
    for chunk in chunks:
        check_chunk(chunk, chat, usage)
    return chunks


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("logprobs", [False, True])
def test_b038_b042_b044_chat_choices_are_separate_streams(frontend: Frontend, n: int, logprobs: bool) -> None:
    answer = frontend.request("POST", CHAT, chat_body(stream=True, n=n, logprobs=logprobs))
    by_index: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks_of(answer, chat=True):
        (choice,) = chunk["choices"]
        by_index.setdefault(choice["index"], []).append(choice)
    assert sorted(by_index) == list(range(n))
    for index, choices in by_index.items():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == expected_text(index, 4)
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"
        assert choices[-1]["delta"] == {}
        positions = [position for choice in choices for position in (choice["logprobs"] or {}).get("content", [])]
        assert len(positions) == (4 if logprobs else 0)


@pytest.mark.parametrize("chat", [True, False])
def test_b039_usage_is_null_until_the_last_chunk(frontend: Frontend, chat: bool) -> None:
    body = (chat_body if chat else text_body)(stream=True, n=2, stream_options={"include_usage": True})
    chunks = chunks_of(frontend.request("POST", CHAT if chat else TEXT, body), chat=chat, usage=True)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 8,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("chat", [True, False])
def test_a_failure_after_the_start_is_one_error_event(frontend: Frontend, chat: bool) -> None:
    body = (chat_body if chat else text_body)("fail", stream=True)
    answer = frontend.request("POST", CHAT if chat else TEXT, body)
    assert answer.status == 200
    assert answer.headers.get("Connection") != "keep-alive"
    last = json.loads(answer.events()[-1])
    assert last == {"error": {"message": "the engine died", "type": "server_error", "param": None, "code": None}}
    assert sum("error" in event for event in answer.events()) == 1


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("line", "code", "seconds"), [("refuse", "queue_full", "3"), ("late", "ttft_target", "1")])
def test_a_refusal_is_a_plain_429_also_of_a_stream(
    frontend: Frontend, chat: bool, stream: bool, line: str, code: str, seconds: str
) -> None:
    body = (chat_body if chat else text_body)(line, stream=stream, n=2)
    answer = frontend.request("POST", CHAT if chat else TEXT, body)
    assert (answer.status, answer.headers["Retry-After"]) == (429, seconds)
    assert answer.headers["Content-Type"].startswith("application/json")
    assert (answer.error()["type"], answer.error()["code"]) == ("rate_limit_error", code)


def test_one_refused_prompt_of_several_refuses_the_request(frontend: Frontend, engine: FakeEngine) -> None:
    body = text_body(stream=True)
    body["prompt"] = ["mute", "refuse"]
    answer = frontend.request("POST", TEXT, body, {"x-request-id": "half-refused"})
    assert (answer.status, answer.error()["code"]) == (429, "queue_full")
    silent = next(r for r in engine.requests if r.external_id == "half-refused" and r.prompt.text == "mute")  # type: ignore[union-attr]
    engine.wait_for_abort(silent.request_id)


def test_one_of_several_prompts_failing_ends_all(frontend: Frontend, engine: FakeEngine) -> None:
    body = text_body(stream=True)
    body["prompt"] = ["hang", "fail"]
    answer = frontend.request("POST", TEXT, body, {"x-request-id": "mixed"})
    assert json.loads(answer.events()[-1])["error"]["message"] == "the engine died"
    hanging = next(r for r in engine.requests if r.external_id == "mixed" and r.prompt.text == "hang")  # type: ignore[union-attr]
    engine.wait_for_abort(hanging.request_id)


def test_silent_streams_get_comments(talkative: Frontend, engine: FakeEngine) -> None:
    connection = talkative.connect()
    connection.request("POST", CHAT, json.dumps(chat_body("hang", stream=True)), {"x-request-id": "silent"})
    response = connection.getresponse()
    seen = b""
    while seen.count(b": keep-alive\n\n") < 2:
        seen += response.read1(65536)
    connection.close()
    engine.wait_for_abort(engine.wait_for_request("silent").request_id)


def read_until(response: http.client.HTTPResponse, end: bytes) -> bytes:
    seen = b""
    while end not in seen:
        part = response.read1(65536)
        assert part, "the stream has ended"
        seen += part
    return seen


def test_comments_come_before_the_first_token_too(talkative: Frontend, engine: FakeEngine) -> None:
    connection = talkative.connect()
    connection.request("POST", CHAT, json.dumps(chat_body("mute", stream=True)), {"x-request-id": "late-token"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.headers["x-request-id"] == "late-token"
    data = read_until(response, b": keep-alive\n\n")
    assert b"data:" not in data
    engine.go_on(engine.wait_for_request("late-token"), "")
    data += response.read()
    connection.close()
    answer = Answer(response.status, dict(response.headers.items()), data)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(answer, chat=True))
    assert text == expected_text(0, 4)


def test_a_failure_after_the_first_comment_is_an_error_event(talkative: Frontend, engine: FakeEngine) -> None:
    connection = talkative.connect()
    connection.request("POST", CHAT, json.dumps(chat_body("mute", stream=True)), {"x-request-id": "late-refusal"})
    response = connection.getresponse()
    data = read_until(response, b": keep-alive\n\n")
    engine.go_on(engine.wait_for_request("late-refusal"), "refuse")
    data += response.read()
    connection.close()
    (event,) = Answer(response.status, {}, data).events()
    assert json.loads(event)["error"]["code"] == "queue_full"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("line", ["hang", "mute", "slow"])
def test_a_client_that_leaves_aborts(frontend: Frontend, engine: FakeEngine, stream: bool, line: str) -> None:
    name = f"leave-{stream}-{line}"
    connection = frontend.connect()
    connection.request("POST", CHAT, json.dumps(chat_body(line, stream=stream)), {"x-request-id": name})
    request = engine.wait_for_request(name)
    connection.sock.close()
    engine.wait_for_abort(request.request_id)


def test_a_client_that_does_not_read_is_cut_off(frontend: Frontend, engine: FakeEngine) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", frontend.port))
        body = json.dumps(chat_body("flood", stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-request-id: deaf\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        engine.wait_for_abort(engine.wait_for_request("deaf").request_id)
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                data += part
        assert data
        assert not data.endswith(b"0\r\n\r\n"), "the stream ended as if it were complete"


def test_a_reading_client_may_take_more_than_the_bound(frontend: Frontend) -> None:
    connection = frontend.connect()
    connection.request("POST", CHAT, json.dumps(chat_body("flood", stream=True)))
    response = connection.getresponse()
    received = 0
    while received < 4 << 20:
        received += len(response.read1(1 << 20))
    connection.close()


def test_a_connection_is_used_again_after_a_stream(frontend: Frontend) -> None:
    connection = frontend.connect()
    for _ in range(3):
        connection.request("POST", CHAT, json.dumps(chat_body(stream=True)))
        response = connection.getresponse()
        first_socket = connection.sock
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert connection.sock is first_socket
    connection.close()


def test_b074_clients_that_leave_in_mid_stream_disturb_nobody(frontend: Frontend, engine: FakeEngine) -> None:
    rng = random.Random(74)
    leaving = rng.sample(range(30), 10)
    connections = [frontend.connect() for _ in range(30)]
    for at, connection in enumerate(connections):
        body = chat_body("hang" if at in leaving else "slow", stream=True)
        connection.request("POST", CHAT, json.dumps(body), {"x-request-id": f"b074-{at}"})
    for at in leaving:
        request = engine.wait_for_request(f"b074-{at}")
        if rng.random() < 0.5:  # else it leaves before anything has come
            response = connections[at].getresponse()
            read_until(response, b"begun")
            response.close()
        connections[at].close()
        engine.wait_for_abort(request.request_id)
    for at, connection in enumerate(connections):
        if at not in leaving:
            assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
            connection.close()
    assert frontend.request("POST", CHAT, chat_body()).status == 200


def test_b070_two_requests_of_one_id_at_the_same_time_are_both_served(frontend: Frontend) -> None:
    connections = [frontend.connect() for _ in range(2)]
    for connection in connections:
        connection.request("POST", CHAT, json.dumps(chat_body("slow", stream=True)), {"x-request-id": "twice"})
    for connection in connections:
        response = connection.getresponse()
        assert response.headers["x-request-id"] == "twice"
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()


def test_many_streams_at_once(frontend: Frontend) -> None:
    connections = [frontend.connect() for _ in range(40)]
    for at, connection in enumerate(connections):
        connection.request("POST", CHAT, json.dumps(chat_body("slow", stream=True, n=1 + at % 3)))
    for at, connection in enumerate(connections):
        data = connection.getresponse().read()
        assert data.count(b'"finish_reason":"length"') == 1 + at % 3
        assert data.endswith(b"data: [DONE]\n\n")
        connection.close()


def test_http_1_0_streams_end_with_the_connection(frontend: Frontend) -> None:
    body = json.dumps(chat_body(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", frontend.port), timeout=20) as connection:
        connection.sendall(head + body)
        data = b""
        while part := connection.recv(65536):
            data += part
    assert data.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in data
