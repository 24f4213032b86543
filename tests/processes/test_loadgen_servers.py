"""What the load generator asks servers of each kind for, and what it says that it cannot have of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.processes.fake_engine import FakeEngine
from tests.processes.frontend.process import Frontend
from tests.processes.mock_openai import MockServer, Stream
from tests.processes.test_loadgen import LENIENT, Result, outputs, write_trace
from tools.loadgen.__main__ import main


def test_no_server_is_asked_for_the_ids_of_prompts(tmp_path: Path) -> None:
    """They would come before the first token, and be as long as the prompt."""
    for owner, ids, options in [
        ("tokenmill", "output", {"include_usage": True}),
        ("vllm", None, {"include_usage": True, "continuous_usage_stats": True}),
        ("llamacpp", None, {"include_usage": True}),
        ("openai", None, {"include_usage": True}),
    ]:
        with MockServer(owner=owner) as mock:
            Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [2]))
            [body] = mock.bodies
        assert body.get("return_token_ids") == ids
        assert body["stream_options"] == options


def test_a_server_of_unknown_kind_gets_openais_fields_only(tmp_path: Path) -> None:
    with MockServer(owner="somebody") as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [2]), "--api", "tokens")
        [body], [headers] = mock.bodies, mock.headers
    assert set(body) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert body["model"] == "mock-model"
    assert not any(name.lower().startswith("x-tokenmill") for name in headers)
    assert any("no way is known" in note for note in result.report["notes"])


def test_a_tokenmill_is_asked_for_exact_lengths_and_its_timeline(tmp_path: Path) -> None:
    choice = {"index": 0, "queued_ms": 1.0, "first_scheduled_ms": 3.5, "first_token_ms": 10.0, "last_token_ms": 12.0}
    choice |= {"preemptions": 1, "completion_tokens": 2}

    async def with_timings(stream: Stream) -> None:
        await stream.chunk(" a")
        await stream.chunk(" b", "length")
        asked = "x-tokenmill-timings" in stream.request.headers
        await stream.end(2, **({"timings": {"request_id": "x", "arrival": 1.0, "choices": [choice]}} if asked else {}))

    with MockServer(owner="tokenmill", behaviours={2: with_timings}) as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [2, 2]))
        plain = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [2]), "--no-timings")
        bodies, headers = mock.bodies, mock.headers
    assert {(body["ignore_eos"], body["stop_on_loop"], body["return_token_ids"]) for body in bodies} == {
        (True, 0, "output")
    }
    assert [head.get("x-tokenmill-timings") for head in headers] == ["1", "1", None]
    assert result.summary["queue"]["mean"] == pytest.approx(0.0025)
    agreement = result.summary["agreement"]
    assert (agreement["joined"], agreement["preemptions"]) == (2, 2)
    written_to_first = [record["times"][0] - record["written"] for record in result.records]
    assert agreement["ttft"]["p50"] == pytest.approx(np.median(written_to_first) - 0.010)
    assert plain.summary["queue"]["n"] == 0


def test_a_server_that_does_not_measure_is_not_asked_for_timelines(tmp_path: Path) -> None:
    """It would refuse every request."""
    note = "the server was started with --no-measure: no timelines, no queue time, no comparison with it"
    with MockServer(owner="tokenmill", measures=False) as mock:
        result = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [2, 2]))
        plain = Result(tmp_path, mock, "--trace", outputs(tmp_path / "trace", [2]), "--no-timings")
    assert result.summary["outcomes"] == {"ok": 2}
    assert note in result.report["notes"]
    assert plain.summary["outcomes"] == {"ok": 1}
    assert note not in plain.report["notes"]


def test_a_real_frontend_that_does_not_measure_answers_all(tmp_path: Path) -> None:
    """With its real refusals, and its real word for why."""
    engine = FakeEngine(tmp_path)
    frontend = Frontend(tmp_path, engine, measure=False).wait_until_ready()
    report = tmp_path / "report.json"
    flags = ("--requests", "5", "--arrivals", "fixed:50", "--input-tokens", "3", "--output-tokens", "4")
    where = ("--url", f"http://127.0.0.1:{frontend.port}", "--token-range", "10:900", "--json", str(report))
    try:
        assert main([*where, *flags, *LENIENT]) == 0
    finally:
        frontend.close()
        engine.close()
    found = json.loads(report.read_text())
    assert found["summary"]["outcomes"] == {"ok": 5}
    assert found["summary"]["uncounted"] == found["summary"]["miscounted"] == 0
    assert sum("--no-measure" in note for note in found["notes"]) == 1


def test_a_recording_says_how_much_of_its_sharing_is_of_outputs(tmp_path: Path) -> None:
    row = {"timestamp": 0, "output_length": 1, "block_size": 4}
    rows = [
        row | {"input_length": 10, "hash_ids": [1, 2, 3], "output_hash_ids": [3]},
        row | {"timestamp": 9, "input_length": 15, "hash_ids": [1, 2, 3, 4]},
    ]
    said = "1 of 5 full blocks of prompts (20.0%), of 3 that the trace shares, were outputs of requests before"
    with MockServer() as mock:
        first = Result(tmp_path, mock, "--trace", write_trace(tmp_path / "trace", rows))
        second = Result(tmp_path, mock, "--trace", write_trace(tmp_path / "one", rows[:1]))
    assert [note.startswith(said) for note in first.report["notes"]].count(True) == 1
    assert not any("outputs of requests" in note for note in second.report["notes"])
