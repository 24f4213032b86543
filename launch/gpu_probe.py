"""Which GPUs the ranks could have: a program of its own asks torch, which the launcher does not load."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable

import msgspec
from msgspec import Struct

from config.machine import Gpu, Machine
from config.schema import Config
from launch.gpus import count_gpus
from launch.helpers import interruptible
from launch.process import child_environment

_COMMAND = [sys.executable, "-m", "kernels.gpu.probe"]
_PATIENCE = 120.0  # seconds; a driver that has to be loaded first takes some


class _Answer(Struct, frozen=True):
    """See `kernels.gpu.probe`."""

    devices: tuple[Gpu, ...] = ()
    problem: str = ""
    versions: dict[str, str] = {}


def find_gpus(config: Config, machine: Machine, say: Callable[[str], None]) -> Machine:
    """`machine` with its GPUs, as far as `config` lets anything depend on them; `say` is told what takes long.

    KeyboardInterrupt on SIGTERM, too.
    """
    worker = config.worker
    if importlib.util.find_spec("triton") is None:
        machine = msgspec.structs.replace(machine, triton_problem="it is not installed")
    may_choose = worker.device == "auto" and worker.kernels in ("auto", "triton") and count_gpus() > 0
    if worker.device != "cuda" and not may_choose:
        return machine
    say("looking for GPUs")
    answer = _ask()
    software = ", ".join(f"{package} {version}" for package, version in answer.versions.items())
    return msgspec.structs.replace(machine, gpus=answer.devices, gpu_problem=answer.problem, gpu_software=software)


def _ask() -> _Answer:
    try:
        with interruptible():
            done = subprocess.run(
                _COMMAND, env=child_environment(), capture_output=True, text=True, check=False, timeout=_PATIENCE
            )
    except subprocess.TimeoutExpired:
        return _Answer(problem=f"the program that looks for them did not answer within {_PATIENCE:g} seconds")
    lines = done.stdout.splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else "", type=_Answer)
    except msgspec.DecodeError:
        last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        return _Answer(problem=f"the program that looks for them failed: {last}")
