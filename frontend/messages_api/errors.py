"""Errors in Anthropic's form.

https://docs.anthropic.com/en/api/errors
"""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from ..errors import ApiError
from ..middleware import REQUEST_ID
from ..protocol import ErrorResponse
from .objects import ErrorEvent, ErrorObject

PATH = "/v1/messages"
OVERLOADED = 529  # Anthropic's own, which its client knows
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_event(error: ApiError) -> ErrorEvent:
    """The error as a stream's last event."""
    return _event(error.status, error.body.message)


def _event(status: int, message: str) -> ErrorEvent:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return ErrorEvent(ErrorObject(kind, message))


def _is_ours(request: web.Request) -> bool:
    return request.path == PATH or request.path.startswith(PATH + "/")


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Anthropic's header for the request's id; runs when a response is prepared."""
    if _is_ours(request):
        response.headers["request-id"] = response.headers[REQUEST_ID]


@web.middleware
async def anthropic_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Around everything else: what answers Anthropic's routes with an error, whoever found it, has Anthropic's form.

    503 becomes 529: for its client that is a server that can take no request at the moment.
    """
    response = await handler(request)
    if not _is_ours(request) or response.status < 400 or not isinstance(response, web.Response):
        return response
    assert isinstance(response.body, bytes)
    message = msgspec.json.decode(response.body, type=ErrorResponse).error.message
    event = _event(response.status, message)
    event.request_id = request["id"]
    response.body = msgspec.json.encode(event)
    if response.status == 503:
        response.set_status(OVERLOADED, "Overloaded")
    return response
