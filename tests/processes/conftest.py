"""A launcher of fake roles that does not outlive its test."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes.launcher import Behaviour, Launcher


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """`launch("--flag", ..., behaviour={"worker-0": ...})` starts it."""
    started: list[Launcher] = []
    with tempfile.TemporaryDirectory(prefix="tm-", ignore_cleanup_errors=True) as run_parent:

        def start(*arguments: str, **options: dict[str, Behaviour]) -> Launcher:
            started.append(Launcher(tmp_path, Path(run_parent), *arguments, **options))
            return started[-1]

        yield start
        for launcher in started:
            if launcher.process.poll() is None:
                launcher.process.kill()
                launcher.process.wait()
