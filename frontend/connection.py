"""One HTTP connection: aiohttp's, except for its answer to bytes that are no HTTP request."""

import logging
import uuid

from aiohttp import web

from .errors import UNAVAILABLE, ApiError
from .middleware import REQUEST_ID

log = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """Errors that arise before or outside of the application get the error object too, and no traceback in the log."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to such an error; the connection closes after it."""
        if request.writer.output_size > 0:
            raise ConnectionError("a response has already begun")
        if status < 500:
            error = ApiError(status, f"this is not an HTTP request: {message or 'malformed'}")
        else:
            log.error("connection failed", exc_info=exc)
            error = ApiError(status, "internal error", type=UNAVAILABLE)
        response = error.response()
        response.headers[REQUEST_ID] = uuid.uuid4().hex
        response.force_close()
        return response
