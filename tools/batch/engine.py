"""An engine without HTTP for the time of a batch: `python -m launch --frontends 0` in a process of its own."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]
_STOP_SECONDS = 30.0


class EngineError(Exception):
    """The engine did not start; it has said why on stderr."""


@asynccontextmanager
async def engine(flags: Sequence[str]) -> AsyncIterator[list[str]]:
    """Start an engine with these flags of `python -m launch`; yields its ZeroMQ endpoints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "launch", "--frontends", "0", *flags, stdout=asyncio.subprocess.PIPE, cwd=_REPOSITORY
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise EngineError(f"the engine did not start (exit status {await process.wait()})")
        yield line.removeprefix("ready ").split()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
