"""The client SDK as a wheel: built as `make wheel` does it, and imported where our checkout is not."""

import importlib.util
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tools.drills import sdk_package

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (importlib.util.find_spec("pip") and importlib.util.find_spec("setuptools")):
        pytest.skip("pip and setuptools, which build the wheel, are not in this environment")
    return sdk_package.build(tmp_path_factory.mktemp("wheel"))


def test_make_takes_the_same_files() -> None:
    [line] = [line for line in (REPOSITORY / "Makefile").read_text().splitlines() if line.startswith("WHEEL := ")]
    assert line.split()[2:] == list(sdk_package.SOURCES)


def test_the_wheel_holds_the_modules_and_the_licence_and_asks_for_two_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    modules = (path.name for path in (REPOSITORY / "ipc").glob("*.py"))
    expected = {f"tokenmill_client/{name}" for name in (*modules, "py.typed")}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("/LICENSE") for name in names)
    requirements = [line.split()[1] for line in text.splitlines() if line.startswith("Requires-Dist:")]
    assert sorted(requirement.partition(">")[0] for requirement in requirements) == ["msgspec", "pyzmq"]
    # The README is what package indexes and `importlib.metadata` show.
    assert (REPOSITORY / "ipc" / "README.md").read_text().strip() in text
    assert "Description-Content-Type: text/markdown" in text


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the package."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True)
    return folder


def test_every_module_imports_without_our_checkout(installed: Path) -> None:
    names = sorted({path.stem for path in (REPOSITORY / "ipc").glob("*.py")} - {"__init__", "__main__"})
    modules = [f"tokenmill_client.{name}" for name in names]
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "import tokenmill_client; print(tokenmill_client.__file__)\n"
        "from tokenmill_client import AsyncClient, Client, RequestFailed\n"
        "print(*(name for name in ('ipc', 'config', 'torch', 'aiohttp') if name in sys.modules))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    file, loaded = done.stdout.split("\n")[:2]
    assert Path(file).is_relative_to(installed)
    assert loaded == ""


def test_the_package_makes_keys(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill_client", "keygen", str(tmp_path / "client.key"), "team"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "client.key").stat().st_mode & 0o777 == 0o600
    assert done.stdout.startswith("curve:")
    assert done.stdout.endswith(" team\n")


_SERVICE = """\
from tokenmill_client import AsyncClient, Client, Completion

reveal_type(Client("ipc:///nowhere").generate("a", max_tokens=5))
reveal_type(Client("ipc:///nowhere").generate("a").usage.total_tokens)
Client("ipc:///nowhere").generate("a", max_tokens="five")
Client("ipc:///nowhere").generate("a", urgency=1)


async def ask(client: AsyncClient) -> Completion:
    return client.generate("a")
"""


def test_mypy_sees_the_types_of_the_installed_package(wheel: Path, tmp_path: Path) -> None:
    if not importlib.util.find_spec("mypy"):
        pytest.skip("mypy is not in this environment")
    # An environment of its own: mypy heeds `py.typed` only in the interpreter's own packages.
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    [site] = environment.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*command, str(wheel)], check=True)
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (tmp_path / "service.py").write_text(_SERVICE)
    python = str(environment / "bin" / "python")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "service.py"]
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    said = re.findall(
        r"^service\.py:(\d+): (?:note: Revealed type is (.*)|error: .*\[(.*)\])$", done.stdout, re.MULTILINE
    )
    assert said == [
        ("3", '"tokenmill_client.results.Completion"', ""),
        ("4", '"int"', ""),
        ("5", "", "arg-type"),
        ("6", "", "call-arg"),
        ("10", "", "return-value"),
    ], done.stdout + done.stderr
