"""The tuner on the real server: calibration, search and confirmation of a tiny trace, and its end by a signal."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

# So close behind each other that what is preferred makes a difference.
ROWS = [{"timestamp": 50 * index, "input_length": 40 + 9 * index, "output_length": 12} for index in range(12)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def command(trace: Path, model: Path, *flags: str) -> list[str]:
    start = [sys.executable, "-m", "tools.tune", "--trace", str(trace), "--slo", "ttft=5s,tpot=1s"]
    return [*start, *flags, "--", "--model", str(model), "--max-seqs", "8", "--kv-memory", "64MiB"]


def test_from_a_trace_to_flags_that_were_measured(tmp_path: Path, trace: Path, model_path: Path) -> None:
    kept, report = tmp_path / "machine.json", tmp_path / "report.json"
    flags = ["--calibration", str(kept), "--calibration-seconds", "5", "--budget", "12", "--json", str(report)]
    done = subprocess.run(
        command(trace, model_path, *flags, "--settings", "max_itl_ms,prefer", "--grid", "prefer=mixed,decode"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # A client that could not keep up on a busy machine is said to be so, and is no failure of the tuner.
    assert done.returncode in (0, 3), done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(report.read_text())
    cost = found["calibration"]["cost"]
    assert cost["fixed"] > 0
    assert cost["prefill_token"] > 0
    assert found["calibration"]["outside"]["arrive_us"] > 0
    default, *others = found["arms"]
    assert default["flags"] == []
    assert 1 <= len([arm for arm in others if arm["searched"]]) <= 3
    assert default["in_grid"]  # since mixed is the default
    assert sum(arm["in_grid"] for arm in others) == 1
    assert "choice / best found" in done.stdout
    for arm in found["arms"]:
        assert arm["measured"]["requests"] == arm["predicted"]["figures"]["requests"] == len(ROWS)
        assert arm["measured"]["answered"] == len(ROWS)
        assert arm["failures"] == []
        assert arm["rescaled"] is not None
        assert all(flag.startswith(("--max-itl-ms=", "--prefer=")) for flag in arm["flags"])
    assert found["chosen"] in [arm["name"] for arm in found["arms"]]
    assert f"chosen: {' '.join(found['flags']) or 'no flags beyond yours'}" in done.stdout
    assert "prediction error" in done.stdout

    # What was measured once is used again: nothing is started.
    again = subprocess.run(
        command(trace, model_path, "--calibration", str(kept), "--budget", "12", "--no-confirm"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert "server:" not in again.stderr
    assert "measured" not in again.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("during", ["launch", "tools.loadgen.worker"])
def test_a_signal_ends_its_server_too(trace: Path, model_path: Path, number: signal.Signals, during: str) -> None:
    """While the server starts, and while it is under load."""
    process = subprocess.Popen(
        command(trace, model_path, "--calibration-seconds", "60"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        tuner = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        children: list[psutil.Process] = []
        while not any(during in child.cmdline() for child in children):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
            children = tuner.children(recursive=True)
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in errors
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
