"""The web console at `/`: its page, and the numbers that the page shows."""

from collections.abc import Callable

from aiohttp import web

from config.schema import ChildSpec

from ..middleware import expect
from ..route import Handler
from ..service import Service
from .events import Events
from .pages import Pages
from .sampling import Sampler


class Console:
    """The routes of the console. The page's files need no key, its numbers do; the page itself calls the API."""

    def __init__(self, spec: ChildSpec, service: Service, ask_for_details: Callable[[bool], None]) -> None:
        """`ask_for_details`: begins and ends the scheduler's sending of `EngineDetails`."""
        self._pages = Pages()
        self._sampler = Sampler(service, ask_for_details)
        self._events = Events(spec, service, self._sampler)

    def add_to(self, app: web.Application) -> None:
        """Register the routes, and an end of all event streams before the server waits for its connections."""
        app.router.add_get("/", self._pages.index, expect_handler=expect)
        app.router.add_get("/console/static/{name}", self._pages.file, expect_handler=expect)
        # No HEAD: aiohttp would answer it with a stream that never ends, and that holds one of the pages' places.
        app.router.add_get("/console/events", self._events.stream, allow_head=False, expect_handler=expect)
        app.on_shutdown.append(self._end)

    @property
    def open_handlers(self) -> tuple[Handler, ...]:
        """Those of the page's files: whoever has no key yet must get the field to enter it."""
        return self._pages.index, self._pages.file

    async def _end(self, app: web.Application) -> None:
        await self._sampler.close()
