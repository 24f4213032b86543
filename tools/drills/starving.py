"""Processes that are stopped most of the time, all at once, as by the CPU limit of a container that they share."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import psutil

_PERIOD = 0.1  # seconds: the usual one of a limit


@asynccontextmanager
async def starved(launcher: int, package: str, share: float) -> AsyncIterator[None]:
    """In the block, the processes of a server that run `package` may run for `share` of every tenth of a second.

    They are stopped at the same moments: were each at its own, a second one would often run while the first cannot.
    """
    pids = _processes(launcher, package)
    assert pids, f"no process of {package}"
    task = asyncio.create_task(_enforce(pids, share))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _enforce(pids: Sequence[int], share: float) -> None:
    try:
        while True:
            _send(pids, signal.SIGSTOP)
            await asyncio.sleep((1 - share) * _PERIOD)
            _send(pids, signal.SIGCONT)
            await asyncio.sleep(share * _PERIOD)
    finally:
        _send(pids, signal.SIGCONT)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and is told of elsewhere
            os.kill(pid, number)


def _processes(launcher: int, package: str) -> list[int]:
    """Those of a server, by the module that their command line ends with."""
    children = psutil.Process(launcher).children(recursive=True)
    return [child.pid for child in children if child.cmdline()[-1:] == [f"{package}.main"]]
