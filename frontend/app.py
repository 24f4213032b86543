"""The aiohttp application of one frontend process.

Orchestrator: only wiring belongs here. Which path is answered by what is in `routes`, the process in `server`.
"""

from aiohttp import web

from . import handlers, openapi
from .gate import GATE, Gate
from .middleware import OPEN_HANDLERS, add_headers, expect, guard
from .routes import ROUTES
from .service import SERVICE, Service
from .streaming import KeepAlive


def make_app(service: Service, keep_alive: KeepAlive, gate: Gate) -> web.Application:
    """The application of one frontend process."""
    app = web.Application(middlewares=[guard])
    app[SERVICE] = service
    app[handlers.KEEP_ALIVE] = keep_alive
    app[GATE] = gate
    app[OPEN_HANDLERS] = frozenset(route.handler for route in ROUTES if not route.needs_key)
    app[openapi.DOCUMENT] = openapi.encode_document(ROUTES, service.served_names)
    app.on_response_prepare.append(add_headers)
    for route in ROUTES:
        add = app.router.add_get if route.method == "GET" else app.router.add_post
        add(route.path, route.handler, expect_handler=expect)
    return app
