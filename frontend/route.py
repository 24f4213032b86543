"""What one route is, for the router and the OpenAPI document."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from msgspec import Struct

from .protocol import ErrorResponse

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Route(Struct, frozen=True, kw_only=True):
    """One path and method. `answer` is a struct for JSON, or the media type of anything else; `error` one of JSON."""

    method: str
    path: str  # as aiohttp writes it
    handler: Handler
    summary: str
    body: Any = None  # type of the JSON body; None: there is none
    answer: Any
    streams: bool = False  # with `stream: true` it answers with server-sent events
    example: dict[str, Any] | None = None  # a body that works, but for the model's name
    needs_key: bool = True  # when the server has API keys
    error: Any = ErrorResponse
    overloaded: int = 503  # the status when no request can be taken at the moment
