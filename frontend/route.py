"""What one route is, for the router and the OpenAPI document."""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct

from .protocol import ErrorResponse

OTHER = "other"  # the pattern of what has none
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Parameter(Struct, frozen=True):
    """One that is sent beside the body: a header or a part of the query."""

    name: str
    place: Literal["header", "query"]
    summary: str
    schema: dict[str, Any]


class Route(Struct, frozen=True, kw_only=True):
    """One path and method. `answer` is a struct for JSON, or the media type of anything else; `error` one of JSON."""

    method: str
    path: str  # as aiohttp writes it
    handler: Handler
    summary: str
    body: Any = None  # type of the JSON body; None: there is none
    answer: Any
    parameters: tuple[Parameter, ...] = ()  # those of the path are in `path`
    streams: bool = False  # with `stream: true` it answers with server-sent events
    example: dict[str, Any] | None = None  # a body that works, but for the model's name
    busy: bool = False  # without a body, it may answer 429 all the same
    needs_key: bool = True  # when the server has API keys
    error: Any = ErrorResponse
    overloaded: int = 503  # the status when no request can be taken at the moment


def pattern_of(request: web.Request) -> str:
    """The path of the route that a request has come to, as aiohttp writes it; never what the client wrote."""
    resource = request.match_info.route.resource
    return OTHER if resource is None else resource.canonical
