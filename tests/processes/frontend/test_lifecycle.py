"""Loading, draining, losing the engine, and what monitoring sees."""

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc.control import Drain, Fail, Idle, Ready
from ipc.stats_messages import Stats
from tests.exposition import value

from ..fake_engine import FakeEngine
from .process import Frontend, wait_until

CHAT = "/v1/chat/completions"
STATS = Stats(
    time=1.0,
    step=77,
    running=3,
    waiting=2,
    blocks_total=100,
    blocks_free=50,
    blocks_cached=20,
    blocks_private=29,
    blocks_in_transit=1,
    blocks_unused=20,
    prompt_tokens=1000,
    cached_tokens=400,
    computed_tokens=900,
    generated_tokens=300,
    preemptions=4,
    finished=12,
    aborted=5,
    refused=6,
    oldest_request_seconds=1.5,
    stuck_request="req-9",
)


def body(line: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": line}], "max_tokens": 4, **fields}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(tmp_path)
    yield engine
    engine.close()


@pytest.fixture
def frontend(engine: FakeEngine, run_dir: Path) -> Iterator[Frontend]:
    frontend = Frontend(run_dir, engine)
    yield frontend.wait_until_ready()
    frontend.close()
    assert b"Traceback" not in frontend.stderr, frontend.stderr.decode()


def open_stream(frontend: Frontend, line: str, **headers: str) -> http.client.HTTPResponse:
    connection = frontend.connect()
    connection.request("POST", CHAT, json.dumps(body(line, stream=True)), headers)
    return connection.getresponse()


def test_only_liveness_while_the_engine_loads(tmp_path: Path, run_dir: Path) -> None:
    engine = FakeEngine(tmp_path, welcome=False)
    frontend = Frontend(run_dir, engine)
    try:
        # The launcher's socket listens from the start, so that this waits for the process instead of failing.
        assert frontend.request("GET", "/health/live").status == 200
        for method, path in (
            ("GET", "/health/ready"),
            ("GET", "/health/progress"),
            ("GET", "/v1/models"),
            ("POST", CHAT),
            ("POST", "/v1/completions"),
        ):
            answer = frontend.request(method, path, body() if method == "POST" else None)
            assert answer.status == 503
            assert answer.error()["type"] == "server_error"
            assert int(answer.headers["Retry-After"]) >= 1
        assert frontend.request("GET", "/metrics").status == 200
        assert not any(isinstance(status, Ready) for status in list(frontend.statuses.queue))
        engine.welcome()
        frontend.wait_for(Ready)
        assert frontend.request("GET", "/health/ready").status == 200
        assert frontend.request("POST", CHAT, body()).status == 200
    finally:
        frontend.close()
        engine.close()


def test_drain_finishes_what_runs_and_refuses_the_rest(frontend: Frontend, engine: FakeEngine) -> None:
    kept = frontend.connect()
    kept.request("GET", "/health/ready")
    assert kept.getresponse().read()
    running = open_stream(frontend, "slow")
    whole = frontend.connect()
    whole.request("POST", CHAT, json.dumps(body("slow")), {"x-request-id": "whole"})
    engine.wait_for_request("whole")
    frontend.order(Drain())

    def draining() -> bool:
        kept.request("GET", "/health/ready")
        response = kept.getresponse()
        response.read()
        return response.status == 503

    wait_until(draining)
    kept.request("POST", CHAT, json.dumps(body()))
    refused = kept.getresponse()
    assert refused.status == 503
    assert json.loads(refused.read())["error"]["code"] == "draining"
    assert running.read().endswith(b"data: [DONE]\n\n")
    finished = whole.getresponse()
    assert (finished.status, json.loads(finished.read())["choices"][0]["finish_reason"]) == (200, "length")
    frontend.wait_for(Idle)
    assert frontend.process.wait(10) == 0


def test_drain_of_an_idle_process_ends_it(frontend: Frontend) -> None:
    idle_connection = frontend.connect()
    idle_connection.request("GET", "/health/live")
    idle_connection.getresponse().read()
    frontend.order(Drain())
    frontend.wait_for(Idle)
    assert frontend.process.wait(10) == 0


@pytest.mark.parametrize("drain_first", [False, True])
def test_fail_tells_every_client_why(frontend: Frontend, engine: FakeEngine, drain_first: bool) -> None:
    streams = [open_stream(frontend, "hang") for _ in range(16)]
    silent = frontend.connect()
    silent.request("POST", CHAT, json.dumps(body("mute", stream=True)), {"x-request-id": "silent"})
    whole = frontend.connect()
    whole.request("POST", CHAT, json.dumps(body("hang")), {"x-request-id": "whole"})
    engine.wait_for_request("silent")
    engine.wait_for_request("whole")
    if drain_first:
        frontend.order(Drain())
    frontend.order(Fail("worker 0 was killed"))
    for stream in streams:
        events = stream.read().decode().split("\n\n")
        assert events.pop() == ""
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["message"] == "worker 0 was killed"
        assert sum('"error"' in event for event in events) == 1
    for connection in (silent, whole):
        response = connection.getresponse()
        assert response.status == 503
        assert json.loads(response.read())["error"]["message"] == "worker 0 was killed"
    assert frontend.process.wait(10) == 0


def test_fail_does_not_wait_for_a_client_that_does_not_read(frontend: Frontend, engine: FakeEngine) -> None:
    with socket.create_connection(("127.0.0.1", frontend.port)) as deaf:
        data = json.dumps(body("hang", stream=True)).encode()
        deaf.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-request-id: deaf\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        )
        deaf.sendall(data)
        engine.wait_for_request("deaf")
        frontend.order(Fail("gone"))
        assert frontend.process.wait(10) == 0


def test_an_engine_that_dies_fails_its_requests_and_comes_back(tmp_path: Path, run_dir: Path) -> None:
    engine = FakeEngine(tmp_path)
    frontend = Frontend(run_dir, engine).wait_until_ready()
    try:
        stream = open_stream(frontend, "hang")
        engine.close()
        assert b'data: {"error":{"message":"the connection to the engine was lost"' in stream.read()
        assert frontend.request("POST", CHAT, body()).status == 503
        assert frontend.request("GET", "/health/live").status == 200
        engine = FakeEngine(tmp_path)
        wait_until(lambda: frontend.request("POST", CHAT, body()).status == 200)
        # The sender of the counters was lost as well: only its successor's count as a sign of life.
        assert frontend.request("GET", "/health/ready").json()["error"]["code"] == "recovering"
        published(frontend, engine, STATS)
        wait_until(lambda: frontend.request("GET", "/health/ready").status == 200)
    finally:
        frontend.close()
        engine.close()


def test_while_the_ranks_are_restarted_it_is_not_ready_but_takes_requests(
    frontend: Frontend, engine: FakeEngine
) -> None:
    published(frontend, engine, msgspec.structs.replace(STATS, engine_ready=False))
    answer = frontend.request("GET", "/health/ready")
    assert answer.status == 503
    assert answer.json()["error"]["code"] == "recovering"
    assert "Retry-After" in answer.headers
    assert frontend.request("GET", "/health/live").status == 200
    assert frontend.request("POST", CHAT, body()).status == 200
    published(frontend, engine, msgspec.structs.replace(STATS, recoveries=1))
    assert frontend.request("GET", "/health/ready").status == 200
    assert frontend.request("GET", "/health/progress").json()["recoveries"] == 1


def published(frontend: Frontend, engine: FakeEngine, stats: Stats = STATS) -> None:
    """Publish until the frontend, which may not have subscribed yet, has got it."""

    def arrived() -> bool:
        engine.publish(stats)
        answer = frontend.request("GET", "/health/progress")
        return answer.status == 200 and answer.json()["engine_ready"] == stats.engine_ready

    wait_until(arrived)


def test_progress(frontend: Frontend, engine: FakeEngine) -> None:
    published(frontend, engine)
    progress = frontend.request("GET", "/health/progress").json()
    assert progress.pop("age_seconds") >= 0
    assert progress == {
        "engine_ready": True,
        "recoveries": 0,
        "step": 77,
        "running": 3,
        "waiting": 2,
        "oldest_stuck_request": {"id": "req-9", "seconds": 1.5},
        "kv_blocks": {"free": 50, "cached": 20, "private": 29, "in_transit": 1, "total": 100},
    }
    assert engine.requests == []  # asking generates nothing


def test_metrics_are_summed_over_frontends(engine: FakeEngine, run_dir: Path) -> None:
    first = Frontend(run_dir, engine).wait_until_ready()
    second = Frontend(run_dir, engine).wait_until_ready()
    try:
        for _ in range(2):
            assert first.request("POST", CHAT, body(n=2)).status == 200
        assert second.request("POST", CHAT, body(stream=True)).status == 200
        assert second.request("POST", CHAT, {**body(), "n": 99}).status == 400
        assert first.request("GET", "/no/such/route").status == 404
        for frontend in (first, second):
            published(frontend, engine)
            deadline = time.monotonic() + 20
            while True:
                answer = frontend.request("GET", "/metrics")
                text = answer.body.decode()
                if value(text, "tokenmill:e2e_request_latency_seconds_count") == 3:
                    break  # the other one has handed on what it counted
                assert time.monotonic() < deadline
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert value(text, "tokenmill:request_success_total", finished_reason="length") == 5
            assert value(text, "tokenmill:time_to_first_token_seconds_count") == 5
            assert value(text, "tokenmill:http_requests_total", route=CHAT, status="200") == 3
            assert value(text, "tokenmill:http_requests_total", route=CHAT, status="400") == 1
            assert value(text, "tokenmill:http_requests_total", route="other", status="404") == 1
            assert value(text, "tokenmill:num_requests_running") == 3
            assert value(text, "tokenmill:num_requests_waiting") == 2
            assert value(text, "tokenmill:kv_cache_usage_perc") == 0.3
            assert value(text, "tokenmill:prompt_tokens_total") == 1000
            assert value(text, "tokenmill:generation_tokens_total") == 300
            assert value(text, "tokenmill:kv_blocks", state="cached") == 20
    finally:
        first.close()
        second.close()


def test_two_frontends_share_one_port(engine: FakeEngine, run_dir: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    first = Frontend(run_dir, engine, listener=listener).wait_until_ready()
    second = Frontend(run_dir, engine, listener=socket.socket(fileno=os.dup(listener.fileno()))).wait_until_ready()
    try:
        first.order(Drain())
        assert first.process.wait(10) == 0
        # The port goes on: what one process no longer accepts, the other does.
        for _ in range(5):
            assert second.request("POST", CHAT, body()).status == 200
    finally:
        first.close()
        second.close()
