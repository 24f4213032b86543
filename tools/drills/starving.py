"""Processes that are stopped most of the time, as by a container's CPU limit, or by others that take the machine."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

_PERIOD = 0.1  # seconds: the usual one of a limit


@asynccontextmanager
async def starved(launcher: int, package: str, share: float) -> AsyncIterator[None]:
    """In the block, each process of a server that runs `package` may run for `share` of every tenth of a second."""
    pids = _processes(launcher, package)
    assert pids, f"no process of {package}"
    tasks = [asyncio.create_task(_enforce(pid, share)) for pid in pids]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _enforce(pid: int, share: float) -> None:
    await asyncio.sleep(random.uniform(0, _PERIOD))  # not all at the same moments
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep((1 - share) * _PERIOD)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(share * _PERIOD)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _processes(launcher: int, package: str) -> list[int]:
    """Those of a server, by the module that their command line ends with."""
    children = psutil.Process(launcher).children(recursive=True)
    return [child.pid for child in children if child.cmdline()[-1:] == [f"{package}.main"]]
