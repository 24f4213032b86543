"""A thousand requests of one SDK client over a restart of the real server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import REPOSITORY


@pytest.mark.slow
def test_every_call_ends_with_a_result_or_a_typed_error(model_path: Path) -> None:
    """The drill exits with an error when one hangs, differs, or raises anything else."""
    command = [sys.executable, "-m", "tools.drills", "sdk", "--model", str(model_path), "--latency-requests", "20"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 cancelled, the server restarted once" in done.stdout
    results = re.search(r"(\d+) results", done.stdout)
    assert results is not None
    assert int(results[1]) >= 600, "what had not begun to be answered is sent again"
    assert "Traceback" not in done.stderr
