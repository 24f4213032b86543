"""Traces of a real frontend process at a collector: OTLP over HTTP, with the caller's trace id."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..fake_engine import FakeEngine
from .process import Frontend, wait_until

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = "/v1/chat/completions"


class Collector:
    """Takes what is posted to it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.paths: set[str] = set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.take(self.path, body, self.headers.get("Content-Encoding", ""))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes, encoding: str) -> None:
        assert encoding == ""
        self.paths.add(path)
        request = service.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.resources.append({entry.key: entry.value.string_value for entry in resource.resource.attributes})
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def body(line: str, **more: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": line}], "max_tokens": 4, **more}


def test_a_request_is_a_trace_with_its_phases(
    engine: FakeEngine, run_dir: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    frontend = Frontend(run_dir, engine, otlp_endpoint=collector.url).wait_until_ready()
    try:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert frontend.request("POST", CHAT, body("hi", stream=True), headers=headers).status == 200
        assert frontend.request("POST", CHAT, body("refuse")).status == 429
        unsampled = {"traceparent": f"00-{'1' * 32}-{PARENT}-00"}
        assert frontend.request("POST", CHAT, body("hi"), headers=unsampled).status == 200
        assert frontend.request("POST", CHAT, body("hi"), headers={"traceparent": "nonsense"}).status == 200
        wait_until(lambda: len([span for span in collector.spans if not span.parent_span_id]) >= 2)
    finally:
        frontend.close()
    assert collector.paths == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "tokenmill"
    assert collector.resources[0]["service.instance.id"] == "frontend-0"
    ours = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    (root,) = [span for span in ours if span.parent_span_id.hex() == PARENT]
    assert (root.name, root.kind) == ("chat tiny", root.SPAN_KIND_SERVER)
    attributes = {entry.key: entry.value for entry in root.attributes}
    assert attributes["gen_ai.operation.name"].string_value == "chat"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    assert [value.string_value for value in attributes["gen_ai.response.finish_reasons"].array_value.values] == [
        "length"
    ]
    below = [span for span in ours if span.parent_span_id == root.span_id]
    assert len(below) == len(ours) - 1
    assert [span.name for span in below] == ["tokenize", "queue", "prefill", "decode"]
    for span in below:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert "1" * 32 not in {span.trace_id.hex() for span in collector.spans}, "its caller does not want it"
    (failed,) = [span for span in collector.spans if span.status.code == span.status.STATUS_CODE_ERROR]
    assert {entry.key: entry.value.string_value for entry in failed.attributes}["error.type"] == "queue_full"
    assert len([span for span in collector.spans if not span.parent_span_id]) == 2


def test_a_collector_that_is_away_costs_nobody_anything(engine: FakeEngine, run_dir: Path) -> None:
    frontend = Frontend(run_dir, engine, otlp_endpoint="http://127.0.0.1:9").wait_until_ready()
    try:
        assert frontend.request("POST", CHAT, body("hi")).status == 200
    finally:
        frontend.close()
    assert b"Traceback" not in frontend.stderr, frontend.stderr.decode()
