"""Fixtures of the workers' tests."""

import pytest

from kernels.cpu.build import BuildError
from kernels.cpu.library import load


@pytest.fixture(scope="session", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """What `make_backend` is to take: each test runs on both, where both can be had."""
    if request.param == "native":
        try:
            load()
        except BuildError as error:
            pytest.skip(f"no native CPU kernels: {error}")
    name: str = request.param
    return name
