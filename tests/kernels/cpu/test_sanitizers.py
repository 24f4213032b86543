"""The kernels' tests once more, in another process, on builds with sanitizers.

AddressSanitizer and UndefinedBehaviorSanitizer: tensors and the engine's own memory lie on the heap, where a step past
either end stops the process. ThreadSanitizer: so does memory that two threads use without an order between them.
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
FILES = (
    "test_layer.py",
    "test_native_attention.py",
    "test_native_ops.py",
    "test_native_sampling.py",
    "test_native_steps.py",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "portable"),
    [("address", False), ("address", True), ("thread", False)],
    ids=["vectors", "portable", "threads"],
)
def test_the_kernels_tests_pass_under_sanitizers(sanitizer: str, portable: bool) -> None:
    isa = "portable" if portable else detect_isa()
    try:
        variables = {"TOKENMILL_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
        environment = os.environ | sanitizer_environment(sanitizer) | variables
        name = build(isa, sanitizer).name
    except BuildError as error:
        pytest.skip(f"no build with sanitizers here: {error}")
    files = [str(TESTS / name) for name in FILES]
    # Not captured: a sanitizer's report ends the process, and what pytest had captured with it.
    options = ["-q", "-s", "-p", "tests.kernels.cpu.sanitized", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    options += ["--sanitizer", sanitizer, "--hypothesis-profile", "sanitized"]
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
