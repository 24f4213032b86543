"""Fixtures of the frontend's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..fake_engine import FakeEngine
from .process import Frontend


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    engine = FakeEngine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def frontend(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """A ready frontend; at the end of the module it must have logged no traceback."""
    yield from _run(Frontend(tmp_path_factory.mktemp("run"), engine, max_body_bytes=1 << 20))


@pytest.fixture(scope="module")
def talkative(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """A frontend that soon sends comments on silent streams. How soon is up to the machine's load."""
    yield from _run(Frontend(tmp_path_factory.mktemp("run"), engine, keepalive_seconds=0.2))


def _run(frontend: Frontend) -> Iterator[Frontend]:
    yield frontend.wait_until_ready()
    frontend.close()
    assert b"Traceback" not in frontend.stderr, frontend.stderr.decode()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path
