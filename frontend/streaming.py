"""Server-sent events: holding the start back, keep-alive comments, and clients that do not read."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from aiohttp import web

from .errors import UNAVAILABLE, ApiError
from .generation import Batch, Generation
from .responses import Responder

log = logging.getLogger(__name__)

MAX_UNSENT = 1 << 20  # bytes; a client that lets more wait is cut off
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client has closed its connection, or was cut off."""


class EventStream:
    """A response of server-sent events. Writing never waits for the client: one that does not read is cut off."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)
        self.last_write = time.monotonic()

    async def open(self) -> None:
        """Prepare the headers; they leave with the first event."""
        if self._request.transport is None:
            raise ClientGone
        # Above our own limit, so that a write returns at once instead of waiting for the client to read.
        self._request.transport.set_write_buffer_limits(high=2 * MAX_UNSENT)
        await self.response.prepare(self._request)

    async def send(self, events: bytes) -> None:
        """Write whole events; raises `ClientGone`."""
        transport = self._request.transport
        if transport is None:
            raise ClientGone
        try:
            await self.response.write(events)
        except ConnectionError:
            raise ClientGone from None
        self.last_write = time.monotonic()
        if transport.get_write_buffer_size() > MAX_UNSENT:
            log.info("request %s: cut off, its client does not read", self._request["id"])
            transport.abort()
            raise ClientGone


class KeepAlive:
    """Sends a comment on every registered stream that has been silent for a while; one task serves all streams."""

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
                    await stream.send(b": keep-alive\n\n")
                except ClientGone:
                    self._streams.discard(stream)  # its own handler ends it


async def stream_answer(
    request: web.Request, generation: Generation, responder: Responder, keep_alive: KeepAlive
) -> web.StreamResponse:
    """Answer with server-sent events.

    Nothing is sent before the first output, so that a failure until then gets a status of its own; a later one becomes
    an error event, after which the connection closes without `[DONE]`.
    """
    batches = generation.batches()
    first = await anext(batches)
    stream = EventStream(request)
    try:
        await stream.open()
        keep_alive.add(stream)
        try:
            await _send_all(stream, first, batches, generation, responder)
        except ApiError as error:
            await _send_error(stream, error)
        except ClientGone:
            raise
        except Exception:
            log.exception("request %s failed", request["id"])
            await _send_error(stream, ApiError(500, "internal error", type=UNAVAILABLE))
    except ClientGone:
        stream.response.force_close()
    finally:
        keep_alive.remove(stream)
    return stream.response


async def _send_all(
    stream: EventStream, first: Batch, rest: AsyncIterator[Batch], generation: Generation, responder: Responder
) -> None:
    await stream.send(responder.chunks(first))
    async for batch in rest:
        if events := responder.chunks(batch):
            await stream.send(events)
    await stream.send(responder.end(generation.usage()))


async def _send_error(stream: EventStream, error: ApiError) -> None:
    stream.response.force_close()
    await stream.send(b"data: " + error.encode() + b"\n\n")
