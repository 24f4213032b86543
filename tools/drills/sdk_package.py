"""The client SDK as users install it: sizes of the wheel and its two packages, and the time of the import."""

import importlib.metadata
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
# What the wheel is made of, as in the Makefile.
SOURCES = ("ipc/*.py", "ipc/py.typed", "ipc/README.md", "ipc/pyproject.toml", "LICENSE")
_PACKAGES = ("pyzmq", "msgspec")

_PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
for name in sys.argv[2:]:
    __import__(name)
print(time.perf_counter() - start)
"""


class Installed(NamedTuple):
    """Sizes in bytes, without compiled bytecode; times in seconds, medians of several new interpreters."""

    sizes: dict[str, int]
    wheel: int
    import_seconds: float
    dependencies_seconds: float  # of that, the two packages and asyncio


def measure(repeats: int) -> Installed:
    """SystemExit where there are no pip and setuptools to build with."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-sdk-") as name:
        folder = Path(name)
        wheel = build(folder)
        site = folder / "site"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
        _run([*command, "--target", str(site), str(wheel)])
        sizes = {"tokenmill_client": _size(site)}
        for package in _PACKAGES:
            sizes[package] = sum(_copied(package, site))
        # One import first: it writes the bytecode.
        _import_seconds(site, "tokenmill_client.sdk")
        whole = [_import_seconds(site, "tokenmill_client.sdk") for _ in range(repeats)]
        parts = [_import_seconds(site, "zmq", "msgspec", "asyncio") for _ in range(repeats)]
        return Installed(sizes, wheel.stat().st_size, statistics.median(whole), statistics.median(parts))


def build(folder: Path) -> Path:
    """The wheel, in a folder that has none yet, made as `make wheel` makes it."""
    source = folder / "source"
    source.mkdir()
    for pattern in SOURCES:
        for path in REPOSITORY.glob(pattern):
            shutil.copy(path, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    _run([*command, "--wheel-dir", str(folder), str(source)])
    [wheel] = folder.glob("tokenmill_client-*.whl")
    return wheel


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:4])} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _copied(package: str, site: Path) -> Iterator[int]:
    """Copies the package of this environment into the folder; sizes of its files."""
    for file in importlib.metadata.files(package) or ():
        source = Path(str(file.locate()))
        if source.suffix == ".pyc" or not source.is_file():
            continue
        target = site / str(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        yield target.stat().st_size


def _import_seconds(site: Path, *modules: str) -> float:
    """In a new interpreter that sees nothing but the standard library and the folder."""
    printed = _run([sys.executable, "-I", "-S", "-c", _PROGRAM, str(site), *modules])
    return float(printed.split()[0])
