"""What GPU and which software this is."""

import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from kernels.gpu.launch import architecture
from tools.bench_kernels.limits import usable_cores

_SMI_SECONDS = 20.0
# As nvidia-smi calls them, and as they are shown.
_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "SM clock under load",
    "clocks.max.sm": "highest SM clock",
    "clocks.mem": "memory clock under load",
    "clocks.max.mem": "highest memory clock",
    "power.draw": "power under load",
    "power.limit": "power limit",
    "temperature.gpu": "temperature, C",
}


def describe(device: torch.device) -> dict[str, str]:
    """The GPU and the versions, in words by name."""
    properties = torch.cuda.get_device_properties(device)
    runtime = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return {
        "card": properties.name,
        "table of settings": architecture(),
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "multiprocessors": str(properties.multi_processor_count),
        "L2 cache": f"{properties.L2_cache_size / 2**20:.0f} MiB",
        "torch": f"{torch.__version__} ({runtime})",
        "triton": triton_version(),
        "Python": platform.python_version(),
        "CPU cores": str(usable_cores()),
    }


def triton_version() -> str:
    for name in ("triton", "pytorch-triton-rocm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not known"


def clocks(device: torch.device) -> dict[str, str]:
    """Driver, clocks and power as nvidia-smi tells them; empty where there is none that answers."""
    which = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SMI_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_clocks(said)


def parse_clocks(said: str) -> dict[str, str]:
    """From nvidia-smi's line of values; what the card does not tell ("[N/A]") is left out."""
    values = [value.strip() for value in said.strip().split(",")]
    if len(values) != len(_FIELDS):
        return {}
    return {name: value for name, value in zip(_FIELDS.values(), values, strict=True) if not value.startswith("[")}


def stamp(machine: Mapping[str, str], date: str) -> str:
    """The `measured` of a table: card, date, versions."""
    return f"{machine['card']}, {date}, torch {machine['torch'].split()[0]}, triton {machine['triton']}"
