"""The parent's side of a process that is killed when it takes too long.

The child does one thing at a time, in order. It is started again after a kill, and once per request after any other
death.
"""

import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from .child_frames import LENGTH, MAX_FRAME_BYTES, Answer, Refused

log = logging.getLogger(__name__)

_START_SECONDS = 30.0  # loading code on a busy machine; nobody's fault
_ROOT = Path(__file__).resolve().parent.parent


class ChildRefused(Exception):
    """The child could not do it; the text is for the client."""


class TookTooLong(Exception):
    """The time limit was reached, and the child was killed."""


class ChildBroken(Exception):
    """The child does not start, or ended twice while it did this."""


class _Gone(Exception):
    """The child ended by itself, or was killed by somebody else."""


class KillableChild:
    """All methods belong to one event loop."""

    def __init__(self, module: str, setup: Struct, timeout: float) -> None:
        """`module` serves requests as `child_frames.serve` does, `setup` first; each may take `timeout` seconds."""
        self._module = module
        self._setup = setup
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._exchange: asyncio.Task[str] | None = None  # with the child; holds the lock
        self._process: asyncio.subprocess.Process | None = None
        self.waited = 0.0  # seconds that requests waited for those before them, since the start
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the child. Raises `ChildRefused` when it can't use the set-up, `ChildBroken` when it does not start."""
        async with self._lock:
            try:
                await self._ensure()
            except _Gone:
                raise ChildBroken from None

    async def close(self) -> None:
        """End the child, whatever it is doing."""
        if self._exchange is not None:
            self._exchange.cancel()
        async with self._lock:
            await self._kill()

    async def ask(self, request: Struct) -> str:
        """What the child answers. Raises `ChildRefused`, `TookTooLong` or `ChildBroken`."""
        asked = time.perf_counter()
        try:
            await self._lock.acquire()
        finally:
            self.waited += time.perf_counter() - asked
        # A task of its own, which a caller that gives up does not cancel: the child would have to be killed, and
        # everybody else would wait for a new one.
        exchange = self._exchange = asyncio.create_task(self._ask_twice(request))
        exchange.add_done_callback(self._exchanged)
        await asyncio.wait({exchange})
        return exchange.result()

    def _exchanged(self, exchange: asyncio.Task[str]) -> None:
        self._exchange = None
        self._lock.release()
        if not exchange.cancelled():
            exchange.exception()  # marks it as seen, when the caller has gone

    async def _ask_twice(self, request: Struct) -> str:
        for attempt in (1, 2):
            try:
                await self._ensure()
                return await self._ask(request, self._timeout)
            except _Gone:
                # Not the time limit; so worth one more try, unless this request is what ends it.
                log.warning("%s ended unexpectedly (attempt %d of 2)", self._module, attempt)
                await self._kill()
            except TimeoutError:
                await self._kill()
                raise TookTooLong from None
        raise ChildBroken

    async def _ensure(self) -> None:
        if self._process is not None and self._process.returncode is None:
            return
        await self._kill()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_ROOT,
        )
        try:
            await self._ask(self._setup, _START_SECONDS)
        except TimeoutError:
            await self._kill()
            raise _Gone from None

    async def _ask(self, request: Struct, seconds: float) -> str:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        body = msgspec.msgpack.encode(request)
        if len(body) > MAX_FRAME_BYTES:
            raise ChildRefused("the request is too long")
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(LENGTH.pack(len(body)) + body)
                await process.stdin.drain()
                (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                if size > MAX_FRAME_BYTES:
                    raise _Gone
                answer = self._decoder.decode(await process.stdout.readexactly(size))
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as error:
            if isinstance(error, TimeoutError):  # in Python 3.11 it is an OSError
                raise
            raise _Gone from None
        except asyncio.CancelledError:
            # Only when this process ends. An answer that nobody reads would be taken for the next one's.
            await self._kill()
            raise
        if isinstance(answer, Refused):
            raise ChildRefused(answer.message)
        return answer.text

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
