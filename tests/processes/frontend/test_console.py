"""The console: its files and their headers, and the numbers it is sent against what monitoring says."""

import http.client
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.console.sampling import MAX_WATCHERS
from ipc.control import Drain, Idle
from ipc.stats_messages import CachedPrefix, EngineDetails, LiveRequest
from tests.exposition import value

from ..fake_engine import FakeEngine
from .process import Frontend, wait_until
from .test_lifecycle import STATS, body

FILES = {
    "style.css": "text/css",
    "app.js": "text/javascript",
    "chart.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
DETAILS = EngineDetails(
    2.0,
    (
        LiveRequest("req-1", "0123456789abcdef", "decode", 40, 16, 44, 5, 2.5, 0),
        LiveRequest("req-2", "", "waiting", 7, 0, 0, 0, 0.25, 1),
    ),
    (CachedPrefix("a1b2c3d4e5f6", "0123456789abcdef:salt", 3, 64, False, 2, 1, 9, 4.5),),
    17,
)


class Events:
    """Reads a stream of events."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def next(self) -> tuple[str, Any] | None:
        """Name and data of the next event; None at the end."""
        fields: dict[str, str] = {}
        while line := self._response.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            fields[name] = value
        return (fields["event"], json.loads(fields["data"])) if fields else None

    def snapshot(self) -> Any:
        while (event := self.next()) is not None:
            if event[0] == "snapshot":
                return event[1]
        raise AssertionError("the stream has ended")


@contextmanager
def watching(frontend: Frontend) -> Iterator[Events]:
    connection = frontend.connect()
    connection.request("GET", "/console/events")
    response = connection.getresponse()
    assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
    try:
        yield Events(response)
    finally:
        response.close()
        connection.close()


def metric(text: str, name: str) -> float:
    return value(text, f"tokenmill:{name}")


# --- files ---


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), *((f"/console/static/{f}", k) for f, k in FILES.items())]
)
def test_a_file_has_its_type_and_lets_nothing_from_elsewhere_in(frontend: Frontend, path: str, kind: str) -> None:
    answer = frontend.request("GET", path)
    assert answer.status == 200
    assert answer.headers["Content-Type"].partition(";")[0] == kind
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in str(policy)
    head = frontend.request("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(answer.body))


def test_a_file_that_is_known_already_is_not_sent_again(frontend: Frontend) -> None:
    first = frontend.request("GET", "/console/static/app.js")
    assert first.headers["Cache-Control"] == "no-cache"
    etag = first.headers["ETag"]
    for known in (etag, f'"other", {etag}', "*"):
        again = frontend.request("GET", "/console/static/app.js", headers={"If-None-Match": known})
        assert (again.status, again.body, again.headers["ETag"]) == (304, b"", etag)
    assert frontend.request("GET", "/console/static/app.js", headers={"If-None-Match": '"other"'}).status == 200


@pytest.mark.parametrize(
    "name", ["", "none.js", "..%2fpages.py", "..%2f..%2fapp.py", "%2e%2e/pages.py", "app.js/", "%00"]
)
def test_nothing_but_the_files_is_served(frontend: Frontend, name: str) -> None:
    answer = frontend.request("GET", f"/console/static/{name}")
    assert answer.status == 404
    assert answer.error()["code"] == "not_found"


class References(HTMLParser):
    """Addresses in a page, and what a policy without inline code would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.addresses += [value for name in ("src", "href") if (value := names.get(name)) and value[0] != "#"]
        self.inline += [name for name in names if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in names):
            self.inline.append(tag)


def test_the_page_and_its_scripts_refer_to_files_of_this_server_only(frontend: Frontend) -> None:
    references = References()
    references.feed(frontend.request("GET", "/").body.decode())
    assert not references.inline
    pending, seen = set(references.addresses), set[str]()
    assert "/console/static/app.js" in pending
    while pending:
        path = pending.pop()
        seen.add(path)
        answer = frontend.request("GET", path)
        assert answer.status == 200, path
        text = answer.body.decode()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), path
        pending |= {f"/console/static/{name}" for name in re.findall(r'from "\./(\w+\.js)"', text)} - seen
    assert len(seen) > 8


def test_an_operator_can_leave_the_console_out(engine: FakeEngine, run_dir: Path) -> None:
    frontend = Frontend(run_dir, engine, console=False).wait_until_ready()
    try:
        for path in ("/", "/console/static/app.js", "/console/events"):
            assert frontend.request("GET", path).error()["code"] == "not_found"
    finally:
        frontend.close()


# --- numbers ---


def test_a_snapshot_says_what_metrics_and_progress_say(frontend: Frontend, engine: FakeEngine) -> None:
    for _ in range(3):
        assert frontend.request("POST", "/v1/chat/completions", body()).status == 200
    with watching(frontend) as events:
        name, about = events.next() or ("", None)
        assert name == "engine"
        assert (about["model"], about["names"]) == ("tiny", ["tiny", "org/tiny"])
        assert (about["kernels"], about["block_size"]) == ("auto", 16)
        name, history = events.next() or ("", None)
        assert name == "history"
        wait_until(engine.is_watched)
        stats = msgspec.structs.replace(STATS, prefill_tokens=600, host_blocks_total=8, host_blocks_used=3)
        engine.publish_details(DETAILS)
        engine.publish(stats)
        while (snapshot := events.snapshot())["sample"]["step"] != 77 or not snapshot["requests"]:
            engine.publish(stats)  # old numbers are not shown
        sample = snapshot["sample"]
        progress = frontend.request("GET", "/health/progress").json()
        for key in ("step", "running", "waiting", "kv_blocks", "recoveries"):
            assert sample[key] == progress[key], key
        text = frontend.request("GET", "/metrics").body.decode()
        assert sample["state"] == "ready"
        assert sample["waiting_tokens"] == metric(text, "num_waiting_tokens")
        assert sample["prompt_tokens"] == metric(text, "prompt_tokens_total")
        assert sample["cached_tokens"] == metric(text, "prefix_cache_hits_total")
        assert sample["generated_tokens"] == metric(text, "generation_tokens_total")
        assert sample["finished"] == metric(text, "requests_finished_total")
        assert sample["preemptions"] == metric(text, "num_preemptions_total")
        assert sample["host_blocks"] == {"used": 3, "total": 8}
        used = sample["kv_blocks"]["total"] - sample["kv_blocks"]["free"] - sample["kv_unused"]
        assert used / sample["kv_blocks"]["total"] == metric(text, "kv_cache_usage_perc")
        # Two seconds on, by the scheduler's clock.
        later = msgspec.structs.replace(
            stats, time=3.0, step=99, prefill_tokens=800, generated_tokens=340, finished=13, device_busy_seconds=1.5
        )
        engine.publish(later)
        while (sample := events.snapshot()["sample"])["step"] != 99:
            engine.publish(later)
        assert sample["rates"] == {"prefill_tokens": 100.0, "decode_tokens": 20.0, "finished": 0.5, "device_busy": 0.75}
    with watching(frontend) as events:
        assert events.next() is not None
        name, history = events.next() or ("", None)
        steps = [sample["step"] for sample in history]
        assert 77 in steps, "a page loaded anew keeps its plots"


def test_latencies_are_those_of_the_histograms(frontend: Frontend) -> None:
    def count(name: str) -> float:
        return metric(frontend.request("GET", "/metrics").body.decode(), f"{name}_count")

    with watching(frontend) as events:
        before = events.snapshot()["sample"]
        observed = {name: count(name) for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")}
        for _ in range(4):
            frontend.request("POST", "/v1/chat/completions", body("slow"))
        ttft = int(count("time_to_first_token_seconds") - observed["time_to_first_token_seconds"])
        itl = int(count("inter_token_latency_seconds") - observed["inter_token_latency_seconds"])
        assert (ttft, itl) == (4, 12)
        deadline = time.monotonic() + 20
        while (sample := events.snapshot()["sample"])["ttft"]["count"] < before["ttft"]["count"] + 4:
            assert time.monotonic() < deadline
        assert sample["itl"]["count"] >= 12
        assert sample["itl"]["p50"] is not None


def test_requests_and_prefixes_are_told_without_text_and_without_the_whole_tenant(
    frontend: Frontend, engine: FakeEngine
) -> None:
    with watching(frontend) as events:
        wait_until(engine.is_watched)
        engine.publish_details(DETAILS)
        while not (snapshot := events.snapshot())["requests"]:
            pass
    assert snapshot["requests"] == [
        {
            "id": "req-1",
            "tenant": "01234567",
            "state": "decode",
            "prompt_tokens": 40,
            "cached_tokens": 16,
            "computed_tokens": 44,
            "generated_tokens": 5,
            "age_seconds": 2.5,
            "preemptions": 0,
        },
        {
            "id": "req-2",
            "tenant": None,
            "state": "waiting",
            "prompt_tokens": 7,
            "cached_tokens": 0,
            "computed_tokens": 0,
            "generated_tokens": 0,
            "age_seconds": 0.25,
            "preemptions": 1,
        },
    ]
    assert snapshot["prefixes"] == [
        {
            "digest": "a1b2c3d4e5f6",
            "tenant": "01234567",
            "tokens": 48,
            "blocks": 3,
            "end": 64,
            "tier": "device",
            "children": 2,
            "users": 1,
            "uses": 9,
            "idle_seconds": 4.5,
        }
    ]
    assert snapshot["prefix_nodes"] == 17


def test_the_scheduler_is_asked_only_while_somebody_looks(frontend: Frontend, engine: FakeEngine) -> None:
    wait_until(lambda: not engine.is_watched())
    with watching(frontend), watching(frontend):
        wait_until(engine.is_watched)
    wait_until(lambda: not engine.is_watched())


def test_not_everybody_can_watch_at_once(frontend: Frontend) -> None:
    opened = []
    try:
        for _ in range(MAX_WATCHERS):
            opened.append(watching(frontend))
            opened[-1].__enter__()
        refused = frontend.request("GET", "/console/events")
        assert (refused.status, refused.error()["code"]) == (503, "too_many_consoles")
    finally:
        for each in opened:
            each.__exit__(None, None, None)


def test_an_open_console_does_not_hold_up_the_end(engine: FakeEngine, run_dir: Path) -> None:
    frontend = Frontend(run_dir, engine).wait_until_ready()
    with watching(frontend) as events:
        assert events.next() is not None
        frontend.order(Drain())
        frontend.wait_for(Idle)
        while events.next() is not None:
            pass
    assert frontend.process.wait(10) == 0
    frontend.close()
    assert b"Traceback" not in frontend.stderr
