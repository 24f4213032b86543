"""An engine without HTTP for the time of a batch: `python -m launch --frontends 0` in a process of its own."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tools.batch.errors import BatchError

_REPOSITORY = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1  # prctl(2)
_STOP_SECONDS = (3.0, 10.0)  # after the first SIGTERM it drains; a second one cuts that short


class Engine:
    """A running engine: the ZeroMQ endpoints for its clients, and its launcher."""

    def __init__(self, endpoints: list[str], process: asyncio.subprocess.Process) -> None:
        self.endpoints = endpoints
        self._process = process

    async def watch(self) -> None:
        """Raises `BatchError` once the engine has ended for good; its launcher replaces dead processes by itself."""
        raise BatchError(f"the engine has ended (exit status {await self._process.wait()})")


def _end_with(parent: int) -> Callable[[], None] | None:
    """For the new process, before it becomes the launcher: SIGTERM when `parent` ends, even by SIGKILL."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it ended before prctl

    return prepare


@asynccontextmanager
async def engine(flags: Sequence[str]) -> AsyncIterator[Engine]:
    """Start an engine with these flags of `python -m launch`; it ends with the block."""
    paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "launch", "--frontends", "0", *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        # Not by its working directory, which relative paths among the flags are meant for.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # the terminal's Ctrl-C is for the batch, which ends the engine itself
        preexec_fn=_end_with(os.getpid()),
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise BatchError(f"the engine did not start (exit status {await process.wait()})")
        yield Engine(line.removeprefix("ready ").split(), process)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    try:
        for seconds in _STOP_SECONDS:
            if process.returncode is None:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), seconds)
    finally:
        if process.returncode is None:
            process.kill()  # the engine's processes end with their launcher
