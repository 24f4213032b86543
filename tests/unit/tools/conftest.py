"""Fixtures for tests of the tools around the GPU kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.gpu import tables
from tests.unit.tools import toy_kernels

TOY = toy_kernels.__name__


@pytest.fixture
def toy_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The name of a module with cases, which takes the place of all shipped ones. It has a cache of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for command in ("check_gpu", "compile_kernels", "tune_kernels"):
        monkeypatch.setattr(f"tools.{command}.__main__.families", lambda: [TOY])
    monkeypatch.setattr("tools.bench_kernels.gpu.families", lambda: [TOY])
    yield TOY
    tables.entries.cache_clear()  # toy_kernels has put its table there
