"""The client SDK as a wheel: built as `make wheel` does it, and imported where our checkout is not."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (importlib.util.find_spec("pip") and importlib.util.find_spec("setuptools")):
        pytest.skip("pip and setuptools, which build the wheel, are not in this environment")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for path in [*(REPOSITORY / "ipc").glob("*.py"), REPOSITORY / "ipc" / "pyproject.toml", REPOSITORY / "LICENSE"]:
        (source / path.name).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)
    [built] = folder.glob("tokenmill_client-*.whl")
    return built


def test_the_wheel_holds_the_modules_and_the_licence_and_asks_for_two_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    expected = {f"tokenmill_client/{path.name}" for path in (REPOSITORY / "ipc").glob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("/LICENSE") for name in names)
    requirements = [line.split()[1] for line in text.splitlines() if line.startswith("Requires-Dist:")]
    assert sorted(requirement.partition(">")[0] for requirement in requirements) == ["msgspec", "pyzmq"]


def test_every_module_imports_without_our_checkout(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*command, str(wheel)], check=True)
    modules = [f"tokenmill_client.{path.stem}" for path in (REPOSITORY / "ipc").glob("*.py") if path.stem != "__init__"]
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "import tokenmill_client; print(tokenmill_client.__file__)\n"
        "print(*(name for name in ('ipc', 'config', 'torch', 'aiohttp') if name in sys.modules))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    file, loaded = done.stdout.split("\n")[:2]
    assert Path(file).is_relative_to(tmp_path)
    assert loaded == ""
