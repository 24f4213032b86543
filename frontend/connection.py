"""One HTTP connection: aiohttp's, with our answer to bytes that are no HTTP request, and a watch on its backlog."""

import asyncio
import fcntl
import logging
import re
import select
import termios
import time
import uuid
from array import array
from collections.abc import Iterable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from .errors import UNAVAILABLE, ApiError
from .middleware import REQUEST_ID

log = logging.getLogger(__name__)

MAX_LINE = 8190  # bytes of the first line, and of each header; aiohttp's own bound
_QUOTED = re.compile(r"[:\n].*", re.DOTALL)


def _reason(message: str, error: BaseException | None) -> str:
    """aiohttp's words without the bytes it quotes, which may be a key or a part of a prompt."""
    if isinstance(error, LineTooLong):
        return f"its first line, and each of its headers, may have at most {MAX_LINE} bytes"
    return _QUOTED.sub("", message)


def _has_hung_up(wire: asyncio.Transport) -> bool:
    """Whether the other side of a TLS connection has closed it without saying so in TLS, of which uvloop tells nothing
    before everything is sent."""
    if wire.get_extra_info("ssl_object") is None or not hasattr(select, "POLLRDHUP"):
        return False
    socket = wire.get_extra_info("socket")
    if socket is None:  # closed, which its protocol is told a turn of the loop later
        return False
    poll = select.poll()
    poll.register(socket.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _unsent(wire: asyncio.Transport) -> int:
    """Bytes that the system has of a connection and the other side has not acknowledged; 0 where it does not tell."""
    socket = wire.get_extra_info("socket")
    if socket is None:  # as above
        return 0
    count = array("i", [0])
    try:
        fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, count)  # tcp(7): SIOCOUTQ
    except OSError:
        return 0
    return count[0]


class Connection(web.RequestHandler):
    """Errors that arise before or outside of the application get the error object too, and no traceback in the log."""

    __slots__ = ("__weakref__", "_backlog", "_since", "_waited", "_wire", "received")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._wire: asyncio.Transport | None = None  # aiohttp forgets its own before everything is sent
        self._backlog = 0  # bytes that waited for the client when last looked
        self._waited = False  # whether anything did
        self._since = 0.0  # seconds of the loop's clock: when that was less, or nothing
        self.received = 0.0  # seconds of the monotonic clock: when the last bytes came in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.received = time.monotonic()
        super().data_received(data)

    def connection_lost(self, error: BaseException | None) -> None:
        self._wire = None
        super().connection_lost(error)

    @property
    def backlog(self) -> int:
        """Bytes that wait here for the client to make room for them."""
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    @property
    def unread(self) -> int:
        """Bytes that the client's machine has not taken in, those in the system's buffer included where it tells."""
        if self._wire is None:
            return 0
        return self.backlog + _unsent(self._wire)

    def check_backlog(self, now: float, most_seconds: float) -> None:
        """Cut the client off when it has not taken in a byte of what waits for it for so long.

        Of a connection that is ending something may wait where it cannot be counted, in the buffers below TLS: uvloop
        waits for them without a limit.
        """
        if self._wire is None:
            return
        backlog = self.backlog
        waits = backlog > 0 or self._wire.is_closing() or _has_hung_up(self._wire)
        if not waits or backlog < self._backlog or not self._waited:
            self._since = now
        self._backlog = backlog
        self._waited = waits
        if now - self._since > most_seconds:
            log.info("a client was cut off that takes in nothing for %g s (%d bytes and more)", most_seconds, backlog)
            self._wire.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to such an error; the connection closes after it."""
        if request.writer.output_size > 0:
            raise ConnectionError("a response has already begun")
        if status < 500:
            error = ApiError(status, f"this is not an HTTP request: {_reason(message or 'malformed', exc)}")
        else:
            log.error("connection failed", exc_info=exc)
            error = ApiError(status, "internal error", type=UNAVAILABLE)
        response = error.response()
        response.headers[REQUEST_ID] = uuid.uuid4().hex
        response.force_close()
        return response


async def watch_backlogs(connections: Iterable[Connection], most_seconds: float) -> None:
    """Cut off clients that take in nothing for so long; runs until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(most_seconds / 8)
        now = loop.time()
        for connection in list(connections):
            connection.check_backlog(now, most_seconds)
