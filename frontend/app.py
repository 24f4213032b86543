"""The aiohttp application of one frontend process.

Orchestrator: only wiring belongs here. Which path is answered by what is in `routes`, the process in `server`.
"""

from aiohttp import web

from . import handlers, openapi
from .console import Console
from .diagnosis import DIAGNOSES, Diagnoses
from .gate import GATE, Gate
from .messages_api.errors import add_request_id, anthropic_errors
from .middleware import OPEN_HANDLERS, add_headers, expect, guard
from .responses_api.handlers import stored_response
from .routes import ROUTES
from .service import SERVICE, Service
from .streaming import KeepAlive


def make_app(
    service: Service, keep_alive: KeepAlive, gate: Gate, diagnoses: Diagnoses, console: Console | None = None
) -> web.Application:
    """The application of one frontend process; without a console, nothing is at `/`."""
    app = web.Application(middlewares=[anthropic_errors, guard])
    app[SERVICE] = service
    app[handlers.KEEP_ALIVE] = keep_alive
    app[GATE] = gate
    app[DIAGNOSES] = diagnoses
    files = () if console is None else console.open_handlers
    app[OPEN_HANDLERS] = frozenset((*files, *(route.handler for route in ROUTES if not route.needs_key)))
    app[openapi.DOCUMENT] = openapi.encode_document(ROUTES, service.served_names)
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(add_request_id)
    for route in ROUTES:
        add = app.router.add_get if route.method == "GET" else app.router.add_post
        add(route.path, route.handler, expect_handler=expect)
    app.router.add_route("*", "/v1/responses/{id:.+}", stored_response, expect_handler=expect)
    if console is not None:
        console.add_to(app)
    return app
