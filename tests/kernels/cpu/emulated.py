"""A pytest plugin (`-p tests.kernels.cpu.emulated`): the kernels' tests run on the library TOKENMILL_EMULATED names.

Without pytest, importing it does the same.
"""

import os
from pathlib import Path

import pytest

from kernels.cpu import library

EMULATED = os.environ["TOKENMILL_EMULATED"]

library.build = lambda progress=None: Path(EMULATED)


def check_loaded() -> None:
    assert EMULATED in Path("/proc/self/maps").read_text(), f"{EMULATED} is not what has run"


def pytest_sessionfinish(session: pytest.Session) -> None:
    check_loaded()
