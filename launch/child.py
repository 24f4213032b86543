"""The first code of every child: `python -m launch.child SPECIFICATION ORDER_FD STATUS_FD MODULE`.

It watches the launcher before it imports anything slow, then loads the role's `main` by name and runs it. Only the
names in the launcher's own table ever come in as MODULE.
"""

import sys

from ipc.control import Control, StartError, StartFailed, in_a_line

if __name__ == "__main__":
    _control = Control(int(sys.argv[2]), int(sys.argv[3]))
    _control.watch()

import ctypes
import importlib
import logging
import os
import signal
from pathlib import Path

import msgspec

from config.schema import ChildSpec
from launch import time_slice
from launch.rank_environment import rank_environment

_PR_SET_PDEATHSIG = 1  # prctl(2)

log = logging.getLogger(__name__)


def _die_with_parent() -> None:
    """A second way to end with the launcher, which works even while one thread keeps all others from running."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _set_environment(spec: ChildSpec) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if spec.role == "worker":
        os.environ.update(rank_environment(spec, os.environ))


def _start_logging(spec: ChildSpec) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=spec.config.supervisor.log_level.upper(),
        format=f"%(asctime)s {spec.role}-{spec.index} %(levelname)s %(name)s: %(message)s",
        force=True,
    )


def run(spec: ChildSpec, control: Control, module: str) -> int:
    """Load and run the role; its exit status."""
    try:
        control.stage("loading code")
        main = importlib.import_module(module).main
        status: int = main(spec, control)
        return status
    except StartError as error:
        control.report(StartFailed(str(error)))
    except Exception as error:
        if control.is_ready:
            log.error("%s; this process ends (--log-level debug shows where)", in_a_line(error))
            log.debug("where it failed", exc_info=True)
        else:
            log.debug("%s failed to start", spec.role, exc_info=True)
            control.report(StartFailed(f"{in_a_line(error)} (--log-level debug shows where)"))
    return 1


def _main(control: Control) -> int:
    _die_with_parent()
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ChildSpec)
    _set_environment(spec)
    _start_logging(spec)
    if spec.role != "worker":  # a rank computes on a CPU, and the others are to go before it when something has come
        time_slice.ask_for(time_slice.SECONDS)
    return run(spec, control, sys.argv[4])


if __name__ == "__main__":
    sys.exit(_main(_control))
