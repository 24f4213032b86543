"""What requests are told of their times, and what is kept of those that have ended."""

import http.client
import itertools
import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest

from tests.chrome_trace import check as check_trace

from ..fake_engine import CACHED, CHUNKS, FakeEngine
from .process import Answer, Frontend, wait_until

HEADER = "x-tokenmill-timings"
WANTED = {HEADER: "1"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 4},
    "/v1/messages": CHAT,
}
ids = (f"call-{number}-{uuid.uuid4().hex[:8]}" for number in itertools.count())


def check_choice(choice: dict[str, Any], index: int = 0, preemptions: int = 0, length: int = 5) -> None:
    """Every field of what the fake engine says of a choice, in its order."""
    times = [choice[f"{name}_ms"] for name in ("queued", "first_scheduled", "first_token", "last_token", "finished")]
    assert times == sorted(times)
    chunks = choice["prefill_chunks"]
    assert chunks[0][0] == chunks[1][0] == choice["first_scheduled_ms"] < chunks[0][1] < chunks[1][1]
    assert chunks[1][1] == choice["first_token_ms"]
    assert [tokens for _, _, tokens in chunks] == list(CHUNKS)
    assert choice["index"] == index
    assert choice["steps"] == 5
    assert choice["preemptions"] == preemptions
    counts = (choice["cached_tokens"], choice["prompt_tokens"], choice["completion_tokens"])
    assert counts == (CACHED + preemptions, length, 4)
    assert len(choice) == 12


def check(timings: dict[str, Any], request_id: str, since: float) -> None:
    assert since - 0.01 <= timings["arrival"] <= time.time() + 0.01
    assert timings["request_id"] == request_id
    assert 0 <= timings["tokenized_ms"] <= timings["choices"][0]["queued_ms"]
    assert 0 <= timings["first_output_ms"] <= (time.time() - since) * 1e3 + 10
    assert set(timings) >= {"request_id", "arrival", "tokenized_ms", "first_output_ms", "choices"}


def told(answer: Answer) -> list[dict[str, Any]]:
    """All timings anywhere in an answer, stream or not, with those inside of a response object."""
    if not answer.headers["Content-Type"].startswith("text/event-stream"):
        parts = [answer.json()]
    else:
        lines = [line for line in answer.body.decode().splitlines() if line.startswith("data: {")]
        parts = [json.loads(line.removeprefix("data: ")) for line in lines]
    parts += [part["response"] for part in parts if "response" in part]
    return [part["timings"] for part in parts if "timings" in part]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_api_tells_them_once_to_those_that_ask(frontend: Frontend, path: str, stream: bool) -> None:
    name, since = next(ids), time.time()
    body = {**BODIES[path], "stream": stream}
    answer = frontend.request("POST", path, body, {**WANTED, "x-request-id": name})
    assert answer.status == 200
    [timings] = told(answer)
    check(timings, name, since)
    [choice] = timings["choices"]
    check_choice(choice)
    for headers in ({}, {HEADER: "0"}):
        assert told(frontend.request("POST", path, body, headers)) == []


@pytest.mark.parametrize("value", ["yes", "", "2", "true", "1, 1"])
@pytest.mark.parametrize("path", BODIES)
def test_another_value_is_refused_by_name(frontend: Frontend, path: str, value: str) -> None:
    answer = frontend.request("POST", path, BODIES[path], {HEADER: value})
    assert answer.status == 400
    assert HEADER in answer.json()["error"]["message"]
    if path != "/v1/messages":
        assert answer.error()["param"] == HEADER


def test_each_choice_of_each_prompt(frontend: Frontend) -> None:
    body = {"model": "tiny", "prompt": ["hello", "world!"], "max_tokens": 4, "n": 2}
    for stream in (False, True):
        [timings] = told(frontend.request("POST", "/v1/completions", {**body, "stream": stream}, WANTED))
        assert len(timings["choices"]) == 4
        for index, choice in enumerate(timings["choices"]):
            check_choice(choice, index, preemptions=index % 2, length=5 + index // 2)


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_official_client_finds_them_in_the_last_chunk(frontend: Frontend, include_usage: bool) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{frontend.port}/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=4,
                n=2,
                stream=True,
                stream_options={"include_usage": include_usage},
                extra_headers=WANTED,
            )
        )
    *others, last = chunks
    assert all("timings" not in (chunk.model_extra or {}) for chunk in others)
    assert last.model_extra is not None
    assert [choice["index"] for choice in last.model_extra["timings"]["choices"]] == [0, 1]
    if include_usage:
        assert last.usage is not None
    else:
        assert last.choices[0].finish_reason == "length"


def record(frontend: Frontend, name: str) -> dict[str, Any]:
    answer = frontend.request("GET", "/debug/requests/" + quote(name, safe=""))
    assert answer.status == 200
    found = answer.json()
    assert isinstance(found, dict)
    return found


def ask(frontend: Frontend, name: str, content: str, *, stream: bool = True) -> Answer:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "stream": stream}
    return frontend.request("POST", "/v1/chat/completions", body, {"x-request-id": name})


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_kept(frontend: Frontend, stream: bool) -> None:
    name, since = next(ids), time.time()
    ask(frontend, name, "my secret text", stream=stream)
    found = record(frontend, name)
    check(found, name, since)
    check_choice(found["choices"][0], length=len("my secret text"))
    assert (found["status"], found["error"], found["route"]) == ("finished", None, "/v1/chat/completions")
    assert 0 <= found["first_output_ms"] <= found["ended_ms"]
    assert "secret" not in json.dumps(found)


def test_requests_that_failed_are_kept_with_what_ended_them(frontend: Frontend) -> None:
    refused, failed = next(ids), next(ids)
    assert ask(frontend, refused, "refuse").status == 429
    assert ask(frontend, failed, "fail").status == 200, "the stream had begun"
    found = record(frontend, refused)
    assert (found["status"], found["error"]) == ("failed", {"status": 429, "code": "queue_full"})
    assert (found["tokenized_ms"], found["first_output_ms"], found["choices"]) == (None, None, [])
    found = record(frontend, failed)
    assert (found["status"], found["error"]) == ("failed", {"status": 503, "code": None})
    assert found["first_output_ms"] <= found["ended_ms"]


def test_embeddings_are_kept_too(frontend: Frontend) -> None:
    name = next(ids)
    headers = {"x-request-id": name}
    assert frontend.request("POST", "/v1/embeddings", {"model": "tiny", "input": ["a", "bc"]}, headers).status == 200
    found = record(frontend, name)
    assert (found["status"], found["route"]) == ("finished", "/v1/embeddings")
    assert [choice["prompt_tokens"] for choice in found["choices"]] == [1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_left_is_kept(frontend: Frontend, engine: FakeEngine, stream: bool) -> None:
    name = next(ids)
    body = {**CHAT, "messages": [{"role": "user", "content": "hang"}], "stream": stream}
    connection = http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"x-request-id": name})
    engine.wait_for_request(name)
    connection.close()
    path = "/debug/requests/" + name
    wait_until(lambda: frontend.request("GET", path).status == 200)
    found = record(frontend, name)
    assert (found["status"], found["error"], found["choices"]) == ("aborted", None, [])


def test_the_newest_come_first_and_a_name_is_the_last_one_that_had_it(frontend: Frontend) -> None:
    names = ["a/b c?d=%41#é".replace("é", "e"), next(ids), next(ids)]
    for name in [*names, names[0]]:
        ask(frontend, name, "hello" if name != names[0] else "refuse")
    newest = frontend.request("GET", "/debug/requests?limit=3").json()
    assert (newest["frontend"], newest["frontends"]) == (0, 1)
    assert [found["request_id"] for found in newest["requests"]] == [names[0], names[2], names[1]]
    assert [found["status"] for found in newest["requests"]] == ["failed", "finished", "finished"]
    assert record(frontend, names[0]) == newest["requests"][0]
    assert len(frontend.request("GET", "/debug/requests").json()["requests"]) >= 3


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "x", "", "1.5", "9" * 30, "%D9%A3"])
def test_a_bad_limit_is_refused(frontend: Frontend, limit: str) -> None:
    answer = frontend.request("GET", f"/debug/requests?limit={limit}")
    assert answer.status == 400
    assert answer.error()["param"] == "limit"
    assert "1 to 10000" in answer.error()["message"]


def test_an_unknown_name_is_not_found(frontend: Frontend) -> None:
    answer = frontend.request("GET", "/debug/requests/nobody")
    assert answer.status == 404
    assert answer.error()["code"] == "not_found"


@pytest.fixture
def own(engine: FakeEngine, run_dir: Path) -> Iterator[Any]:
    started: list[Frontend] = []

    def start(**server: Any) -> Frontend:
        started.append(Frontend(run_dir, engine, **server).wait_until_ready())
        return started[-1]

    yield start
    for frontend in started:
        frontend.close()


def test_no_more_than_the_setting_are_kept(own: Any) -> None:
    frontend = own(timeline_requests=2)
    for name in ("one", "two", "three", "two"):
        ask(frontend, name, "hello")
    kept = frontend.request("GET", "/debug/requests").json()["requests"]
    assert [found["request_id"] for found in kept] == ["two", "three"]
    assert frontend.request("GET", "/debug/requests/one").status == 404


def test_none_are_kept_where_the_setting_is_0(own: Any) -> None:
    frontend = own(timeline_requests=0)
    assert told(frontend.request("POST", "/v1/chat/completions", CHAT, WANTED)) != []
    for path in ("/debug/requests", "/debug/requests/one"):
        answer = frontend.request("GET", path)
        assert answer.status == 404
        assert "--timeline-requests is 0" in answer.error()["message"]


def test_they_need_a_key_where_there_are_some(own: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sha256:" + "0" * 64 + "\n")
    frontend = own(api_key_file=str(keys))
    for path in ("/debug/requests", "/debug/requests/one", "/debug/trace?seconds=0.1"):
        assert frontend.request("GET", path).status == 401


def short_trace(frontend: Frontend) -> Answer:
    """As soon as no other one is being taken."""
    while (answer := frontend.request("GET", "/debug/trace?seconds=2")).status == 429:
        pass
    return answer


def test_a_trace_of_this_process_alone(engine: FakeEngine, tmp_path: Path, run_dir: Path) -> None:
    """The engine behind it tells nothing here; requests that failed or were left have a span without phases."""
    traces = {"frontend-0": f"ipc://{tmp_path}/trace"}
    frontend = Frontend(run_dir, engine, traces=traces).wait_until_ready()
    try:
        with ThreadPoolExecutor(2) as threads:
            running = threads.submit(short_trace, frontend)
            wait_until(lambda: frontend.request("GET", "/debug/trace?seconds=0.1").status == 429)
            ask(frontend, "one", "hello")
            ask(frontend, "two", "refuse")
            answer = running.result()
        assert answer.status == 200
        found = check_trace(answer.body)
        spans = {span.args["request_id"]: span for span in found.overlapping["http"]}
        assert [spans[name].args["status"] for name in ("one", "two")] == ["finished", "failed"]
        assert [span.name for span in found.overlapping["request"]] == ["one [0]"]
        assert [name for _, name, _ in found.instants] == ["first byte"]
        assert frontend.request("GET", "/debug/trace?seconds=0.1").status == 200, "one after the other"
    finally:
        frontend.close()


@pytest.mark.parametrize("seconds", ["0", "0.05", "61", "nan", "inf", "-1", "x", ""])
def test_a_bad_length_of_a_trace_is_refused(frontend: Frontend, seconds: str) -> None:
    answer = frontend.request("GET", f"/debug/trace?seconds={seconds}")
    assert answer.status == 400
    assert answer.error()["param"] == "seconds"
    assert "0.1 to 60" in answer.error()["message"]
