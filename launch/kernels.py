"""Whether there are compiled CPU kernels: found out by having them, before the memory plan depends on it.

A program of its own compiles them, once for a machine, into the cache from which the ranks take them.
"""

import ctypes
import subprocess
import sys
from collections.abc import Callable

import msgspec

from config.resolve import Machine
from config.schema import Config
from ipc.control import StartError
from launch.process import child_environment

_COMMAND = [sys.executable, "-m", "kernels.cpu.build"]
_BAD_SETTING = 2  # its exit status
_FAILURE = "build: "  # how it begins to say why


def find_kernels(config: Config, machine: Machine, say: Callable[[str], None]) -> Machine:
    """`machine` with all that `config` lets depend on compiled kernels; `say` is told what takes long.

    StartError when they were asked for in a way that is impossible.
    """
    if config.worker.kernels != "auto":
        return machine
    problem = _problem(say)
    return msgspec.structs.replace(machine, native_kernels=not problem, kernels_problem=problem)


def _problem(say: Callable[[str], None]) -> str:
    """Why there are none, or ""."""
    said: list[str] = []
    pipe = subprocess.PIPE
    with subprocess.Popen(_COMMAND, env=child_environment(), stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if said or line.startswith(_FAILURE):
                    said.append(line.removeprefix(_FAILURE))
                else:
                    say(line.rstrip())
            printed = process.stdout.read()
        except BaseException:
            process.kill()
            raise
    if process.returncode == _BAD_SETTING:
        raise StartError("".join(said).rstrip())
    if process.returncode:
        return "".join(said).rstrip() or f"the program that compiles them ended with status {process.returncode}"
    library = printed.rstrip().rpartition(" (")[0]
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return f"they can't be loaded: {error}"
    return ""
