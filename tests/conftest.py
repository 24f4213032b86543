"""Fixtures shared by all tests: what a test needs from outside the repository is found here, or it skips saying so.

Ids such as B089 in test names and docstrings are those of shared/cases/cases.jsonl: what other servers got wrong.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from launch.gpus import count_gpus

# Read when triton is imported: without a GPU, its kernels run under its interpreter.
if not count_gpus():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that tests start take the CPU also beside a GPU, unless a test says otherwise.
os.environ.setdefault("TOKENMILL_DEVICE", "cpu")

# How long an example takes says nothing about it: the machine may be busy.
settings.register_profile("tokenmill", deadline=None)
settings.load_profile("tokenmill")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run tests (pytest-xdist), a file stays in one, and all that start the real server in one.

    So fixtures are made once, and no two servers want the same cores.
    """
    for item in items:
        file = item.path.relative_to(REPOSITORY)
        item.add_marker(pytest.mark.xdist_group("server" if file.parts[1] in ("e2e", "fuzz") else str(file)))


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, which `make setup` puts into models/."""
    path = REPOSITORY / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in models/: run `make setup`")
    return path


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference outputs, cases and traces that lie beside the checkout on development machines."""
    path = Path(os.environ.get("TOKENMILL_SHARED", REPOSITORY.parent / "shared"))
    if not (path / "reference").exists():
        pytest.skip("the shared/ folder with reference outputs is not beside this checkout (set TOKENMILL_SHARED)")
    return path
