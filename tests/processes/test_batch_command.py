"""`python -m tools.batch` as a command, up to the point where it would start a model."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_batch(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    (directory / "in.jsonl").write_text(json.dumps(request) + "\n")
    return subprocess.run(
        [sys.executable, "-m", "tools.batch", "in.jsonl", "out.jsonl", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_paths_among_the_engines_flags_belong_to_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "here.gguf").write_bytes(b"this is no model")
    done = run_batch(tmp_path, "--model", "here.gguf")
    assert done.returncode == 2
    assert "not a GGUF file" in done.stderr, "it was found, and read"
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_that_another_batch_writes_to_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with output.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run_batch(tmp_path, "--resume", "--model", "nowhere.gguf")
    assert done.returncode == 2
    assert f"error: {output}: another batch is writing to it" in done.stderr
    assert "Traceback" not in done.stderr
    assert output.read_bytes() == b""
