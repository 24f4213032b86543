"""The aiohttp application: which path is answered by what.

Orchestrator: only wiring belongs here. Handlers are in `handlers` and `health`, the process in `server`.
"""

from aiohttp import web

from . import handlers, health
from .console import Console
from .middleware import add_headers, expect, guard
from .service import SERVICE, Service
from .streaming import KeepAlive


def make_app(service: Service, keep_alive: KeepAlive, console: Console | None = None) -> web.Application:
    """The application of one frontend process; without a console, nothing is at `/`."""
    app = web.Application(middlewares=[guard])
    app[SERVICE] = service
    app[handlers.KEEP_ALIVE] = keep_alive
    app.on_response_prepare.append(add_headers)
    app.router.add_post("/v1/chat/completions", handlers.chat_completions, expect_handler=expect)
    app.router.add_post("/v1/completions", handlers.completions, expect_handler=expect)
    app.router.add_get("/v1/models", handlers.list_models, expect_handler=expect)
    app.router.add_get("/v1/models/{id:.+}", handlers.get_model, expect_handler=expect)
    app.router.add_get("/health/live", health.live, expect_handler=expect)
    app.router.add_get("/health/ready", health.ready, expect_handler=expect)
    app.router.add_get("/health/progress", health.progress, expect_handler=expect)
    app.router.add_get("/metrics", health.metrics, expect_handler=expect)
    if console is not None:
        console.add_to(app)
    return app
