"""Server-sent events: holding the start back, keep-alive comments, and clients that do not read."""

import asyncio
import logging
import time

from aiohttp import web

from .errors import UNAVAILABLE, ApiError
from .generation import Batch, Generation
from .middleware import CLIENT_GONE
from .rendering import Renderer

log = logging.getLogger(__name__)

MAX_UNSENT = 1 << 20  # bytes; a client that lets more wait is cut off
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client has closed its connection, or was cut off."""


class EventStream:
    """A response of server-sent events, whose headers leave with the first of them.

    Sending never waits for the client: one that does not read is cut off. Call `finish` after the last event, and
    `close` whatever happens.
    """

    def __init__(self, request: web.Request, keep_alive: bytes) -> None:
        self.keep_alive = keep_alive
        self.response = web.StreamResponse(headers=_HEADERS)
        self.last_write = time.monotonic()
        self._request = request
        self._beginning: asyncio.Task[None] | None = None  # sends the headers, and `_first` behind them
        self._first: list[bytes] = []
        self._prepared = False
        self._chunked = False

    @property
    def begun(self) -> bool:
        """True: it is too late for another status."""
        return self._beginning is not None

    def send(self, events: bytes) -> None:
        """Write whole events; raises `ClientGone`."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise self._gone()
        if self._prepared:
            # The chunked coding of RFC 9112, section 7.1, without aiohttp's bookkeeping for each token.
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        else:
            self._first.append(events)
            if self._beginning is None:
                self._beginning = asyncio.create_task(self._begin(transport))
        self.last_write = time.monotonic()
        if transport.get_write_buffer_size() > MAX_UNSENT:
            log.info("request %s: cut off, its client does not read", self._request["id"])
            transport.abort()
            raise self._gone()

    def _gone(self) -> ClientGone:
        self._request[CLIENT_GONE] = True
        return ClientGone()

    async def _begin(self, transport: asyncio.WriteTransport) -> None:
        # Above our own limit, so that a write returns at once instead of waiting for the client to read.
        transport.set_write_buffer_limits(high=2 * MAX_UNSENT)
        try:
            await self.response.prepare(self._request)
            self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"  # not for HTTP/1.0
            self._prepared = True
            await self.response.write(b"".join(self._first))  # by aiohttp, which puts the headers in front
        except ConnectionError:
            self._request[CLIENT_GONE] = True  # whoever sends next finds the transport closed

    async def finish(self) -> None:
        """Return when all events have been written."""
        if self._beginning is not None:
            await self._beginning

    def close(self) -> None:
        """Stop sending."""
        if self._beginning is not None:
            self._beginning.cancel()


class KeepAlive:
    """Sends a comment, or what its API has for that, on every registered stream that has been silent for a while.

    One task serves all streams. The comment may be the first thing that is sent on a stream.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._streams: set[EventStream] = set()

    def add(self, stream: EventStream) -> None:
        self._streams.add(stream)

    def remove(self, stream: EventStream) -> None:
        self._streams.discard(stream)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 4)
            silent_since = time.monotonic() - self._seconds
            for stream in [stream for stream in self._streams if stream.last_write <= silent_since]:
                try:
                    stream.send(stream.keep_alive)
                except ClientGone:
                    self._streams.discard(stream)  # its own handler ends it


async def stream_answer(
    request: web.Request, generation: Generation, renderer: Renderer, keep_alive: KeepAlive
) -> web.StreamResponse:
    """Answer with server-sent events.

    Nothing is sent before the first output or the first keep-alive comment, so that a failure until then gets a status
    of its own; a later one becomes an error event, after which the connection closes without `[DONE]`.
    """
    stream = EventStream(request, renderer.keep_alive)

    def take(batch: Batch) -> None:
        if events := renderer.chunks(batch):
            stream.send(events)

    keep_alive.add(stream)
    try:
        try:
            await generation.deliver(take)
            stream.send(renderer.end(generation.usage()))
        except ClientGone:
            raise
        except Exception as error:
            if not stream.begun:
                raise
            if not isinstance(error, ApiError):
                log.exception("request %s failed", request["id"])
                error = ApiError(500, "internal error", type=UNAVAILABLE)
            generation.timeline.fail(error)
            stream.response.force_close()
            generation.close()
            stream.send(renderer.error(error))
        await stream.finish()
    except ClientGone:
        stream.response.force_close()
    finally:
        keep_alive.remove(stream)
        stream.close()
    return stream.response
