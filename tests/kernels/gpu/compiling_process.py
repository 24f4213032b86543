"""Programs that compile kernels, in processes of their own: in this one Triton may run them under its interpreter."""

import os
import subprocess
import sys

from tests.conftest import REPOSITORY


def run_compiling(module: str, *arguments: str, seconds: float) -> str:
    """What the program `module` prints; AssertionError when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-10000:]}\n{done.stderr[-2000:]}"
    return done.stdout
