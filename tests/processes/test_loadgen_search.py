"""The load generator's search for the highest rate, against a server that answers everything, nothing, or is gone."""

import http.server
import json
import threading
from pathlib import Path

import pytest

from tests.processes.mock_openai import MockServer
from tests.processes.test_loadgen import LENIENT, Result, only_done, write_trace
from tools.loadgen.__main__ import main


def test_the_search_probes_higher_and_higher_while_all_is_met(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with MockServer() as mock:
        flags = ("--arrivals", "fixed:20", "--requests", "100", "--output-tokens", "2", "--input-tokens", "4")
        search = ("--find-rate", "--slo", "ttft=1000s", "--probe-seconds", "0.5", "--probes", "3")
        result = Result(tmp_path, mock, *flags, *search, "--html", str(page))
        prompts = [tuple(body["prompt"]) for body in mock.bodies]
    assert result.status == 0
    assert [probe["rate"] for probe in result.report["probes"]] == pytest.approx([20, 40, 80])
    assert [probe["measured"] for probe in result.report["probes"]] == [10, 20, 40]
    assert [found["rate"] for found in result.report["found"]] == pytest.approx([80, 80])
    assert result.report["found"][0]["missed_at"] is None
    assert len(set(prompts)) == len(prompts)  # no probe finds its prompts in the cache that another has filled
    assert "http://" not in page.read_text().replace(mock.url, "")


def test_a_search_in_which_nothing_is_answered_has_failed(tmp_path: Path) -> None:
    with MockServer(behaviours={2: only_done}) as mock:
        flags = ("--arrivals", "fixed:50", "--requests", "8", "--output-tokens", "2", "--input-tokens", "4")
        search = ("--find-rate", "--slo", "ttft=1s", "--probe-seconds", "0.1", "--probes", "2")
        assert Result(tmp_path, mock, *flags, *search).status == 1


class OnlyModels(http.server.BaseHTTPRequestHandler):
    """Says what it serves."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m", "owned_by": "mock"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_search_whose_server_is_gone_ends_with_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the first question nobody listens any more."""
    server = http.server.HTTPServer(("127.0.0.1", 0), OnlyModels)

    def answer_once() -> None:
        server.handle_request()
        server.server_close()

    thread = threading.Thread(target=answer_once)
    thread.start()
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    where = ("--url", f"http://127.0.0.1:{server.server_address[1]}", "--json", str(report), "--html", str(page))
    flags = ("--arrivals", "fixed:50", "--requests", "8", "--output-tokens", "2", "--input-tokens", "4")
    search = ("--find-rate", "--slo", "ttft=1s", "--probe-seconds", "0.1")
    assert main([*where, *LENIENT, *flags, *search]) == 1
    thread.join()
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    expected = "the server is gone: all 5 connections for requests at 50.000 requests/s failed: ClientConnectorError: "
    assert expected in error
    found = json.loads(report.read_text())
    assert found["probes"] == []
    assert expected in found["notes"][-1]
    assert "the server is gone" in page.read_text()


def test_a_rate_that_a_trace_cannot_have_does_not_cost_the_others(tmp_path: Path) -> None:
    """At lower rates a probe would be of the first batch alone, whose requests come at one moment."""
    rows = [{"timestamp": at, "input_length": 3, "output_length": 2} for at in (0, 0, 0, 0, 1000, 1000)]
    with MockServer(behaviours={2: only_done}) as mock:
        search = ("--find-rate", "--slo", "ttft=1s", "--probe-seconds", "1")
        result = Result(tmp_path, mock, "--trace", write_trace(tmp_path / "trace", rows), *search)
    assert result.status == 1
    assert [probe["rate"] for probe in result.report["probes"]] == [5.0]
