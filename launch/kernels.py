"""Whether there are compiled CPU kernels: found out by having them, before the memory plan depends on it.

A program of its own compiles them, once for a machine, into the cache from which the ranks take them.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from config.machine import Machine
from config.schema import Config
from config.sources import ConfigError
from ipc.control import StartError
from launch.helpers import interruptible
from launch.process import child_environment

_COMMAND = [sys.executable, "-m", "kernels.cpu.build"]
_BAD_SETTING = 2  # its exit status
_FAILURE = "build: "  # how it begins to say why
_INDENT = "\n    "


def find_kernels(config: Config, machine: Machine, say: Callable[[str], None]) -> Machine:
    """`machine` with all that depends on compiled kernels, for a `config` that leaves them open or wants them.

    `say` is told what takes long.
    ConfigError for variables that cannot be used, StartError where kernels were demanded that can't be had,
    KeyboardInterrupt on SIGTERM, too.
    """
    problem = _problem(say)
    if problem and config.worker.kernels == "native":
        raise StartError(f"--kernels native: compiled kernels can't be had: {problem}")
    return msgspec.structs.replace(machine, native_kernels=not problem, kernels_problem=problem)


def _problem(say: Callable[[str], None]) -> str:
    """Why there are none, or ""."""
    said: list[str] = []
    pipe = subprocess.PIPE
    # In a session of its own, so that it can be ended together with its compilers.
    with (
        interruptible(),
        subprocess.Popen(
            _COMMAND, env=child_environment(), stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process,
    ):
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
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    text = "".join(said).rstrip().replace("\n", _INDENT)
    if process.returncode == _BAD_SETTING:
        raise ConfigError(text)
    if process.returncode:
        return text or f"the program that compiles them ended with status {process.returncode}"
    library = printed.rstrip().rpartition(" (")[0]
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return f"they can't be loaded: {error}. Delete {library}, to have them compiled again"
    return ""
