"""The one error type of the HTTP side, and its response."""

import math
from collections.abc import Mapping

import msgspec
from aiohttp import web

from ipc.messages import Failed
from ipc.validation import InvalidRequest

from .protocol import ErrorBody, ErrorResponse

INVALID = "invalid_request_error"
UNAVAILABLE = "server_error"


class ApiError(Exception):
    """An error with its HTTP status, shaped like OpenAI's error object. `retry_after` is in seconds; `headers` are
    further ones of its response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message, type, param, code)
        self.retry_after = retry_after
        self.headers = headers

    @classmethod
    def of_failed(cls, failed: Failed) -> "ApiError":
        return cls(
            failed.status,
            failed.message,
            type=failed.type,
            param=failed.param,
            code=failed.code,
            retry_after=failed.retry_after,
        )

    @classmethod
    def of_invalid(cls, error: InvalidRequest) -> "ApiError":
        return cls(400, error.message, param=error.param, code=error.code)

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """The same with the engine's name of a parameter replaced by the one that the client knows it by."""
        param = self.body.param
        if param is not None and param in names:
            self.body.param = names[param]
            self.body.message = self.body.message.replace(param, names[param], 1)
        return self

    def encode(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(self.body))

    def response(self) -> web.Response:
        response = web.Response(status=self.status, body=self.encode(), content_type="application/json")
        response.headers.update(self.headers)
        if self.retry_after is not None:
            response.headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        return response


def not_measured(what: str) -> ApiError:
    """404 for what a server does not have that takes no times down; `what` is said of it first."""
    return ApiError(404, f"{what}: the server was started with --no-measure", code="not_measured")


def unavailable(message: str, code: str) -> ApiError:
    """503 for a server that takes no requests at the moment."""
    return ApiError(503, message, type=UNAVAILABLE, code=code, retry_after=1)
