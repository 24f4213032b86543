"""One real server for all tests that only read from it; tests that kill things start their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server


@pytest.fixture(scope="session")
def server(model_path: Path) -> Iterator[Server]:
    """The default model in float32, whose rounding is small enough to ask for exact tokens."""
    with Server(model_path, "--dtype", "float32", "--served-model-name", "smol") as running:
        yield running


@pytest.fixture
def endpoint(server: Server) -> str:
    """Where the server's own stderr says that ZeroMQ clients connect."""
    return server.said(r"ZeroMQ clients: (\S+?)\)?$")
