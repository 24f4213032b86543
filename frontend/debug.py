"""What the last requests' ways through the engine were, and what all processes do. No text is known here."""

import asyncio
import math
import re

import msgspec
from aiohttp import web

from ipc.trace_messages import Trace
from ipc.tracing import FLUSH_SECONDS, TraceListener

from .answers import encoded_response, json_response
from .errors import ApiError, not_measured
from .service import SERVICE, Service
from .timelines import clock_offset
from .timings import RequestList
from .trace_file import trace_file

REQUESTS = 100  # that are told of unless the query says otherwise
MOST_REQUESTS = 10_000
TRACE_SECONDS = 5.0  # unless the query says otherwise
LEAST_TRACE_SECONDS, MOST_TRACE_SECONDS = 0.1, 60.0
_MAX_TRACED = 200_000  # items; what comes behind those is left out
_NUMBER = re.compile(r"[0-9]{1,9}")


async def requests(request: web.Request) -> web.StreamResponse:
    """GET /debug/requests"""
    service = _keeping(request)
    limit = _limit(request)
    timelines = service.timelines.newest(limit)

    def written() -> bytes:
        records = [timeline.record() for timeline in timelines]
        return msgspec.json.encode(RequestList(service.index, service.frontends, records))

    # In a thread: thousands of them take longer than streams can wait.
    return encoded_response(await asyncio.to_thread(written))


async def request_by_id(request: web.Request) -> web.StreamResponse:
    """GET /debug/requests/{id}"""
    service = _keeping(request)
    timeline = service.timelines.get(request.match_info["id"])
    if timeline is None:
        where = "this server" if service.frontends == 1 else f"this one of {service.frontends} frontend processes"
        kept = service.timelines.size
        raise ApiError(
            404,
            f"{where} has no request with this x-request-id among the last {kept} that ended (--timeline-requests)",
            code="not_found",
        )
    return json_response(timeline.record())


def _keeping(request: web.Request) -> Service:
    service = request.app[SERVICE]
    if not service.measures:
        raise not_measured("no timelines are kept here")
    if not service.timelines.size:
        raise ApiError(404, "no timelines are kept here (--timeline-requests is 0)", code="not_found")
    return service


def _limit(request: web.Request) -> int:
    """How many are wanted; 400 when that is no number, or out of bounds."""
    given = request.query.get("limit", str(REQUESTS))
    if not _NUMBER.fullmatch(given) or not 1 <= int(given) <= MOST_REQUESTS:
        raise ApiError(400, f"limit must be a whole number from 1 to {MOST_REQUESTS}", param="limit")
    return int(given)


async def trace(request: web.Request) -> web.StreamResponse:
    """GET /debug/trace"""
    service = request.app[SERVICE]
    seconds = _seconds(request)
    if service.tracing:
        raise ApiError(429, "this process is taking a trace already", code="trace_running", retry_after=seconds)
    found = _Traces()
    listener = TraceListener(service.trace_endpoints, found.add)
    service.tracing = True
    try:
        listener.start()
        # The last of it is sent a little later.
        await asyncio.sleep(seconds + 2 * FLUSH_SECONDS)
        return encoded_response(await asyncio.to_thread(trace_file, found.traces, clock_offset()))
    finally:
        service.tracing = False
        listener.close()


class _Traces:
    """What has arrived, up to a limit."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self._room = _MAX_TRACED

    def add(self, trace: Trace) -> None:
        kept = trace.items[: self._room]
        self._room -= len(kept)
        self.traces.append(Trace(trace.process, kept, trace.lost + len(trace.items) - len(kept)))


def _seconds(request: web.Request) -> float:
    """How long the trace shall be; 400 when that is no number, or out of bounds."""
    try:
        seconds = float(request.query.get("seconds", TRACE_SECONDS))
    except ValueError:
        seconds = math.nan
    if not LEAST_TRACE_SECONDS <= seconds <= MOST_TRACE_SECONDS:
        limits = f"{LEAST_TRACE_SECONDS:g} to {MOST_TRACE_SECONDS:g}"
        raise ApiError(400, f"seconds must be a number from {limits}", param="seconds")
    return seconds
