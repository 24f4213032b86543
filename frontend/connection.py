"""One HTTP connection: aiohttp's, with our answer to bytes that are no HTTP request, and a watch on its backlog."""

import asyncio
import logging
import uuid
from collections.abc import Iterable
from typing import Any, cast

from aiohttp import web

from .errors import UNAVAILABLE, ApiError
from .middleware import REQUEST_ID

log = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """Errors that arise before or outside of the application get the error object too, and no traceback in the log."""

    __slots__ = ("__weakref__", "_backlog", "_since", "_wire")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._wire: asyncio.Transport | None = None  # aiohttp forgets its own before everything is sent
        self._backlog = 0  # bytes that waited for the client when last looked
        self._since = 0.0  # seconds of the loop's clock: when that was less, or nothing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def connection_lost(self, error: BaseException | None) -> None:
        self._wire = None
        super().connection_lost(error)

    def check_backlog(self, now: float, most_seconds: float) -> None:
        """Cut the client off when the bytes that wait for it have not become fewer for so long."""
        if self._wire is None:
            return
        backlog = self._wire.get_write_buffer_size()
        if not backlog or backlog < self._backlog or not self._backlog:
            self._since = now
        self._backlog = backlog
        if now - self._since > most_seconds:
            log.info("a client was cut off that takes in nothing of %d bytes for %g s", backlog, most_seconds)
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
            error = ApiError(status, f"this is not an HTTP request: {message or 'malformed'}")
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
