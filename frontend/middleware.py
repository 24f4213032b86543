"""Around every handler: the request id, the API key, error objects, and counting."""

import asyncio
import logging
import re
import time
import uuid
from urllib.parse import quote

from aiohttp import HttpVersion11, web

from .errors import UNAVAILABLE, ApiError
from .gate import GATE
from .route import Handler, pattern_of
from .service import SERVICE

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
IGNORED = "x-tokenmill-ignored"
MAX_IGNORED = 20  # names in the header
MAX_IGNORED_LENGTH = 64  # characters of each, before encoding
_VALID_ID = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,127}")
CLIENT_GONE = "client_gone"  # set on a request whose client left, or was cut off, while it was answered
_CLIENT_CLOSED = 499  # nginx's number for a client that left; only metrics see it


OPEN_HANDLERS: web.AppKey[frozenset[Handler]] = web.AppKey("open_handlers", frozenset)  # they need no API key


def note_ignored(request: web.Request, names: list[str]) -> None:
    """Name fields that had no effect in the response's header, besides those noted before."""
    request["ignored"] = [*request.get("ignored", ()), *names]


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers that every response has; runs when it is prepared."""
    response.headers[REQUEST_ID] = request.get("id") or uuid.uuid4().hex
    if ignored := request.get("ignored"):
        shown = (quote(name[:MAX_IGNORED_LENGTH], safe="") for name in ignored[:MAX_IGNORED])
        response.headers[IGNORED] = ",".join(shown)
    request.app[GATE].add_cors_headers(request, response)


async def expect(request: web.Request) -> None:
    """Ask for the body of a client that waits for `100 Continue`; runs before the middlewares.

    `guard` refuses other expectations, with an error object. RFC 9110, section 10.1.1.
    """
    if _expectation(request) == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # aiohttp takes more for a response that has begun


def _expectation(request: web.Request) -> str:
    """The `Expect` header, empty where it has no meaning, which is before HTTP/1.1."""
    return request.headers.get("Expect", "").lower() if request.version >= HttpVersion11 else ""


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, check its key, turn what its handler raises into an error object, count the answer."""
    started = time.monotonic()
    status = _CLIENT_CLOSED
    try:
        response = await _answer(request, handler)
        if not request.get(CLIENT_GONE):
            status = response.status
        return response
    finally:
        route = pattern_of(request)
        request.app[SERVICE].metrics.http_request(route, status)
        log.debug("%s %s %s %d %.3f s", request.get("id"), request.method, route, status, time.monotonic() - started)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get(REQUEST_ID)
    valid = given is not None and _VALID_ID.fullmatch(given) is not None
    request["id"] = given if valid else uuid.uuid4().hex
    try:
        if given is not None and not valid:
            raise ApiError(400, f"{REQUEST_ID} must have 1 to 128 printable ASCII characters", param=REQUEST_ID)
        if _expectation(request) not in ("", "100-continue"):
            raise ApiError(417, "Expect: the only expectation that can be met is 100-continue")
        gate = request.app[GATE]
        if gate.is_preflight(request):
            return gate.preflight(request)
        request["tenant"] = gate.admit(request, needs_key=request.match_info.handler not in request.app[OPEN_HANDLERS])
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = ApiError(405, f"{request.method[:32]} is not allowed here: use {allowed}").response()
        response.headers["Allow"] = allowed
        return response
    except web.HTTPNotFound:
        # The target of CONNECT, and a URL that ends with its host, have no path.
        asked = request.path or request.raw_path.partition("?")[0]
        return ApiError(404, f"there is no {asked[:200]} here", code="not_found").response()
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("request %s failed", request["id"])
        return ApiError(500, "internal error", type=UNAVAILABLE).response()
