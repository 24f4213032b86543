"""Every kernel compiles for GPUs that are not here, without spills, within their shared memory.

In processes of their own: in this one Triton may run kernels under its interpreter.
"""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY


def compile_kernels(*arguments: str, seconds: float) -> None:
    command = [sys.executable, "-m", "tools.compile_kernels", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-10000:]}\n{done.stderr[-2000:]}"


def test_a_case_of_each_kernel() -> None:
    compile_kernels("--quick", "--architecture", "sm_90", "gfx942", seconds=300)


@pytest.mark.slow
def test_all_cases_and_settings_for_all_architectures() -> None:
    compile_kernels(seconds=3600)
