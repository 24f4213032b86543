"""A pytest plugin: the kernels' tests run on a build with a sanitizer.

`-p tests.kernels.cpu.sanitized --sanitizer NAME`, in a process with the variables that
`kernels.cpu.build.sanitizer_environment(NAME)` gives. Sanitized code is ten times slower: there is a profile of
hypothesis with fewer examples, for `--hypothesis-profile`.
"""

import functools
from pathlib import Path

import pytest
from hypothesis import settings

from kernels.cpu import library
from kernels.cpu.build import SANITIZERS, build

settings.register_profile("sanitized", max_examples=40)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sanitizer", choices=list(SANITIZERS), required=True)


def pytest_configure(config: pytest.Config) -> None:
    library.build = functools.partial(build, sanitize=config.getoption("sanitizer"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which of our libraries this process has loaded."""
    mapped = {Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines()}
    ours = sorted(name for name in mapped if name.startswith("tokenmill_cpu-"))
    terminalreporter.write_line(f"kernels: {' '.join(ours)}")
