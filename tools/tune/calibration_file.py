"""`--calibration FILE`: what was measured of a server, and of which one, so that it is not taken for another's."""

import platform
from pathlib import Path

import msgspec
from msgspec import Struct

from config.machine import Machine
from config.schema import Config
from launch.model_source import ModelSource
from tools.tune.predicting import Calibration

_CPUINFO = Path("/proc/cpuinfo")
_HINT = "delete it to have it measured anew, or name another file"
# What steps cost depends on, in a resolved configuration.
_SETTINGS = {
    "model": ("dtype", "kv_dtype", "quantization"),
    "scheduler": ("block_size",),
    "worker": ("device", "tp", "threads", "pin_threads", "kernels", "deterministic", "cuda_graphs"),
}


class CalibrationFileError(Exception):
    """A file that cannot be used here; the text is one line for the user."""


class Subject(Struct, frozen=True, kw_only=True):
    """What was measured: the machine, the model, and the worker's settings by their flags, as they were resolved."""

    machine: str
    model: str
    settings: dict[str, str]


class _Content(Struct, frozen=True, kw_only=True):
    subject: Subject
    calibration: Calibration


def subject_of(config: Config, machine: Machine, source: ModelSource) -> Subject:
    """`config`: resolved. A model is known by its name and the size of its weights."""
    path = source.path
    weights = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
    gpus = ", ".join(gpu.name for gpu in machine.gpus) if config.worker.device == "cuda" else ""
    return Subject(
        machine=f"{_cpu_name()}, {machine.cores} cores" + (f", {gpus}" if gpus else ""),
        model=f"{source.name}, {weights:,} bytes",
        settings={
            "--" + name.replace("_", "-"): str(getattr(getattr(config, section), name))
            for section, names in _SETTINGS.items()
            for name in names
        },
    )


def _cpu_name() -> str:
    """As the kernel has it; on machines of which it has none, the kind of instructions."""
    try:
        lines = _CPUINFO.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def read_calibration(file: Path, subject: Subject) -> Calibration:
    """Raises `CalibrationFileError` for a file that is damaged or of something else than `subject`, and OSError."""
    try:
        content = msgspec.json.decode(file.read_bytes(), type=_Content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CalibrationFileError(f"--calibration {file}: no calibration of this version: {error}: {_HINT}") from None
    calibration = content.calibration
    if not any(calibration.cost.coefficients):
        raise CalibrationFileError(f"--calibration {file}: all costs in it are 0: {_HINT}")
    if differences := _differences(content.subject, subject):
        raise CalibrationFileError(f"--calibration {file}: measured with {'; '.join(differences)}: {_HINT}")
    return calibration


def write_calibration(file: Path, subject: Subject, calibration: Calibration) -> None:
    """Raises OSError."""
    content = _Content(subject=subject, calibration=calibration)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(content)))


def _differences(then: Subject, now: Subject) -> list[str]:
    """What is not the same, in words for people."""
    found = [
        f"another {name}: {ours}, here {theirs}"
        for name, ours, theirs in (("machine", then.machine, now.machine), ("model", then.model, now.model))
        if ours != theirs
    ]
    flags = sorted(then.settings.keys() | now.settings.keys())
    pairs = [(flag, then.settings.get(flag, "unknown"), now.settings.get(flag, "unknown")) for flag in flags]
    return [*found, *(f"{flag} {before}, here {after}" for flag, before, after in pairs if before != after)]
