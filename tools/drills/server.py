"""A real server for the time of a drill, and a client that notes when each token came."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from tools.event_stream import data_lines

MODEL_NAME = "drill"

_LAST_LINES = 15  # of its stderr, shown when a server has failed


@dataclass(slots=True)
class Reply:
    """What one streamed completion got; times are seconds on the clock of `time.perf_counter`."""

    sent: float
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # one for each token: when its chunk came
    finish_reason: str | None = None
    error: str = ""
    ended: float = 0.0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean time between the tokens after the first, in seconds; 0 for a single one."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None and not self.error


class Running(NamedTuple):
    """A server."""

    url: str
    pid: int  # of its launcher


@asynccontextmanager
async def server(model: str, *flags: str, variables: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """The URL of a server that runs for the time of the block; see `running`."""
    async with running(model, *flags, variables=variables) as found:
        yield found.url


@asynccontextmanager
async def running(model: str, *flags: str, variables: Mapping[str, str] | None = None) -> AsyncIterator[Running]:
    """Start `python -m launch` on a free port, and end it with the block.

    `variables`: of its environment, beside or instead of this process's own.

    SystemExit when it does not start. Its stderr goes to a file, which is kept, and its end shown, when it fails.
    """
    command = [sys.executable, "-m", "launch", "--model", model, "--port", "0", "--served-model-name", MODEL_NAME]
    print("  server:", " ".join(flags) or "defaults", file=sys.stderr)
    with tempfile.NamedTemporaryFile(prefix="tokenmill-drill-", suffix=".log", delete=False) as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--log-level", "error", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(variables or {})},
        )
    log = Path(errors.name)
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
    except asyncio.CancelledError:
        await _end(process, log)
        raise
    if not line.startswith("ready "):
        await process.wait()
        raise SystemExit(f"the server did not start with: {' '.join(flags)}\n{_last_words(log)}")
    try:
        yield Running(line.removeprefix("ready ").strip(), process.pid)
    finally:
        await _end(process, log)


async def _end(process: asyncio.subprocess.Process, log: Path) -> None:
    if process.returncode is not None:
        print(f"the server died, with exit status {process.returncode}\n{_last_words(log)}", file=sys.stderr)
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)  # whatever still runs is not waited for
    await process.wait()
    await asyncio.to_thread(log.unlink)


def _last_words(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:]
    return "\n".join([f"the end of {log}:", *(f"  {line}" for line in lines)])


@asynccontextmanager
async def http(buffer: int = 0, headers: Mapping[str, str] = {}) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without limits of its own. `headers`: of all its requests.

    `buffer`: about so many bytes are taken in before anybody reads them.
    """
    timeout = aiohttp.ClientTimeout(total=None)

    def small(address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        return made

    connector = aiohttp.TCPConnector(limit=0, socket_factory=small if buffer else None)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=headers, read_bufsize=buffer or 1 << 16
    ) as session:
        yield session


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int] | str,
    max_tokens: int,
    reply: Reply | None = None,
    bytes_a_second: float = 0.0,
    **params: Any,
) -> Reply:
    """One streamed completion without an end of sequence; fills `reply` as it goes, so that others can watch.

    `bytes_a_second`: no more is read than that; 0: whatever comes.
    """
    reply = reply or Reply(0.0)
    body = {
        "model": MODEL_NAME,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
        "temperature": 0,
        "ignore_eos": True,
        **params,
    }
    reply.sent = time.perf_counter()
    try:
        async with session.post(url + "/v1/completions", json=body) as response:
            reply.status = response.status
            if response.status != 200:
                reply.error = (await response.text())[:300]
            else:
                pieces = response.content.iter_any()
                await read_events(_slowly(pieces, bytes_a_second) if bytes_a_second else pieces, reply)
    except (aiohttp.ClientError, ConnectionError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.ended = time.perf_counter()
    return reply


async def _slowly(pieces: AsyncIterable[bytes], bytes_a_second: float) -> AsyncIterator[bytes]:
    async for piece in pieces:
        yield piece
        await asyncio.sleep(len(piece) / bytes_a_second)


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """What a drill looks at: it shares the machine with the server, and must take little of it."""

    choices: list[_Choice] = []
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


async def read_events(body: AsyncIterable[bytes], reply: Reply) -> None:
    """Take in server-sent events, however they are cut; the tokens of one piece have come at the same time."""
    async for lines in data_lines(body):
        now = time.perf_counter()
        for line in lines:
            if not line.startswith(b"{"):
                continue
            event = _decode_event(line)
            if event.error is not None:
                reply.error = event.error.message
                return
            for choice in event.choices:
                reply.token_ids += choice.token_ids
                reply.times += [now] * len(choice.token_ids)
                reply.finish_reason = choice.finish_reason or reply.finish_reason


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """One number of /metrics, by the end of its name; 0 when it is not there."""
    async with session.get(url + "/metrics") as response:
        for line in (await response.text()).splitlines():
            key, _, value = line.rpartition(" ")
            if not line.startswith("#") and key.split("{")[0].endswith(name):
                return float(value)
    return 0.0


async def work_done(session: aiohttp.ClientSession, url: str) -> str:
    """What the server had to do besides, since its start, in words."""
    await asyncio.sleep(1.0)  # the next counters
    names = "preemptions", "recomputed_tokens", "swapped_out_blocks", "swapped_in_blocks", "engine_recoveries"
    counts = [int(await metric(session, url, f"{name}_total")) for name in names]
    return (
        f"{counts[0]} preemptions, {counts[1]} tokens recomputed, {counts[2]} blocks out, {counts[3]} in, "
        f"{counts[4]} recoveries"
    )
