"""GET /diagnose, and what the doctor makes of it, with an engine that always finds the same."""

import json
from pathlib import Path

import pytest

from tools.doctor.__main__ import main

from ..fake_engine import FakeEngine
from .process import Frontend, wait_until


@pytest.fixture
def url(frontend: Frontend) -> str:
    return f"http://127.0.0.1:{frontend.port}"


def test_the_newest_diagnosis_as_an_object(frontend: Frontend) -> None:
    answer = frontend.request("GET", "/diagnose")
    assert answer.status == 200
    told = answer.json()
    assert (told["seconds"], told["arrived"], told["finished"]) == (30.0, 5, 4)
    assert told["measures"]["waiting"] == 3.5
    ttft, throughput = told["metrics"]
    assert (ttft["name"], ttft["value"]) == ("ttft", 1.25)
    assert ttft["parts"] == {"queue: max_seqs": 1.0, "its own prompt": 0.25}
    assert ttft["causes"] == [
        {
            "cause": "queue",
            "evidence": "3.5 waited",
            "setting": "--max-seqs",
            "before": "2",
            "after": "8",
            "predicted": 0.3,
            "confidence": 0.8,
            "effects": {"throughput": 12.5},
        }
    ]
    assert throughput["causes"][0]["setting"] is None


def test_it_needs_a_key_where_there_are_some(engine: FakeEngine, run_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sha256:" + "0" * 64 + "\n")
    frontend = Frontend(run_dir, engine, api_key_file=str(keys)).wait_until_ready()
    try:
        assert frontend.request("GET", "/diagnose").status == 401
    finally:
        frontend.close()


def test_a_frontend_tells_the_engine_how_it_does(frontend: Frontend, engine: FakeEngine) -> None:
    wait_until(lambda: any(report.name == "frontend-0" and report.lag_looks > 0 for report in engine.reports))
    report = engine.reports[-1]
    assert report.cpu_seconds > 0
    assert (report.slow, report.backlog) == (0, 0)


def test_the_doctor_says_what_to_turn(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url]) == 0
    text = capsys.readouterr().out
    assert "--max-seqs 2 -> --max-seqs 8: 1.25 s -> 300 ms (sure; queue)" in text
    assert "throughput 12.5 tokens/s" in text
    assert "no setting would change much" in text
    assert "25% were cut at max_tokens" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_doctor_prints_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", f"{url}/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"] == "ttft is bound by queue"
