"""The kernels' tests once more, on a build with AddressSanitizer and UndefinedBehaviorSanitizer, in another process.

Tensors and the engine's own memory lie on the heap, where a step past either end stops the process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import BuildError, build, detect_isa, sanitizer_environment

REPOSITORY = Path(__file__).resolve().parents[3]
TESTS = Path(__file__).resolve().parent
# These have nothing to do with what the library computes.
LEFT_OUT = {"test_build.py", "test_instruction_sets.py", "test_sanitizers.py"}


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_kernels_tests_pass_under_sanitizers(portable: bool) -> None:
    isa = "portable" if portable else detect_isa()
    try:
        environment = os.environ | sanitizer_environment() | {"TOKENMILL_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
        name = build(isa, sanitize=True).name
    except BuildError as error:
        pytest.skip(f"no build with sanitizers here: {error}")
    files = sorted(str(path) for path in TESTS.glob("test_*.py") if path.name not in LEFT_OUT)
    # Not captured: a sanitizer's report ends the process, and what pytest had captured with it.
    options = ["-q", "-s", "-p", "tests.kernels.cpu.sanitized", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    report = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, report[-10_000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), report[-10_000:]
    assert f"kernels: {name}\n" in done.stdout, report[-10_000:]
