"""The aiohttp application: which path is answered by what.

Orchestrator: only wiring belongs here. Handlers are in `handlers` and `health`, the process in `server`.
"""

from aiohttp import web

from . import handlers, health
from .middleware import add_headers, guard
from .service import SERVICE, Service
from .streaming import KeepAlive


def make_app(service: Service, keep_alive: KeepAlive) -> web.Application:
    """The application of one frontend process."""
    app = web.Application(middlewares=[guard])
    app[SERVICE] = service
    app[handlers.KEEP_ALIVE] = keep_alive
    app.on_response_prepare.append(add_headers)
    app.router.add_post("/v1/chat/completions", handlers.chat_completions)
    app.router.add_post("/v1/completions", handlers.completions)
    app.router.add_get("/v1/models", handlers.list_models)
    app.router.add_get("/v1/models/{id:.+}", handlers.get_model)
    app.router.add_get("/health/live", health.live)
    app.router.add_get("/health/ready", health.ready)
    app.router.add_get("/health/progress", health.progress)
    app.router.add_get("/metrics", health.metrics)
    return app
