"""Fixtures of the native CPU kernels' tests."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu import build as build_module
from kernels.cpu.build import BuildError, find_compiler
from kernels.cpu.library import load

_FAKE_COMPILER = """#!/bin/sh
# Writes its input files' names into its output; waits as long as a file $0.hold exists.
if [ "$1" = --version ]; then cat "$0.version"; exit; fi
echo "$@" >> "$0.log"
while [ -e "$0.hold" ]; do sleep 0.02; done
for word in "$@"; do
    [ "$previous" = -o ] && output=$word
    previous=$word
done
echo "$@" > "$output"
"""


class FakeCompiler:
    """A program that stands for a C++ compiler, and remembers what it was told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text(_FAKE_COMPILER)
        path.chmod(0o755)
        self.hold = Path(f"{path}.hold")
        self.set_version("fake c++ 1.0")

    def set_version(self, line: str) -> None:
        """What it answers to --version."""
        Path(f"{self.path}.version").write_text(f"{line}\nmore words\n")

    def calls(self) -> list[list[str]]:
        """Arguments of each compilation and link so far."""
        log = Path(f"{self.path}.log")
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    def compiled(self) -> list[str]:
        """Names of the sources compiled so far, sorted."""
        return sorted(Path(word).name for call in self.calls() for word in call if word.endswith(".cpp"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, not yet there; the variables that choose a library are unset."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOKENMILL_KERNEL_CACHE", str(folder))
    monkeypatch.delenv("TOKENMILL_CPU_ISA", raising=False)
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """CXX is a fake."""
    fake = FakeCompiler(tmp_path / "fake-c++")
    monkeypatch.setenv("CXX", str(fake.path))
    return fake


@pytest.fixture
def real_compiler() -> str:
    """The command of a C++ compiler."""
    command = find_compiler()
    if command is None:
        pytest.skip("this machine has no C++ compiler (g++ or clang++)")
    return command


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two small source files and a header."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.cpp").write_text(
        '#include "answer.h"\n'
        'extern "C" __attribute__((visibility("default"))) int answer(int i) { int a[2] = {ANSWER, 0}; return a[i]; }\n'
    )
    (folder / "other.cpp").write_text("int other() { return 1; }\n")
    return folder


@pytest.fixture
def set_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Call it with the `flags` line that /proc/cpuinfo is to have."""

    def put(flags: str) -> None:
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\nvendor_id\t: Anyone\nflags\t\t: {flags}\nbugs\t\t: avx512f\n")
        monkeypatch.setattr(build_module, "CPUINFO", file)

    return put


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The compiled kernels."""
    try:
        return load()
    except BuildError as error:
        pytest.skip(f"no native CPU kernels: {error}")
