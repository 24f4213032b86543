"""Errors of the client SDK, by what a caller can do about them.

All are `RequestFailed`, which has what the HTTP error object of the same failure has.
"""

from .messages import Failed


class RequestFailed(Exception):
    """A request that ended by an error. `failed` is the message that says so, the server's or the client's own."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed

    @property
    def status(self) -> int:
        """The HTTP status of such a failure."""
        return self.failed.status

    @property
    def message(self) -> str:
        return self.failed.message

    @property
    def param(self) -> str | None:
        """The parameter that is wrong."""
        return self.failed.param

    @property
    def code(self) -> str | None:
        return self.failed.code

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the same request may be taken; None when that would not help, or nobody knows."""
        return self.failed.retry_after


class BadRequest(RequestFailed):
    """400: the request can never be answered as it is; `param` names what is wrong with it."""


class AuthenticationFailed(RequestFailed):
    """401: the server does not know this client's key, or is not the one whose key the client was given."""


class DeadlineExceeded(RequestFailed):
    """408: the request's deadline came first."""


class Conflict(RequestFailed):
    """409: a request with this idempotency key still runs, or has run and its answer is gone."""


class Overloaded(RequestFailed):
    """429: the server has too much to do; `retry_after` says when to come again."""


class Cancelled(RequestFailed):
    """499: it was aborted, or its client was closed, while somebody waited for it."""


class ServerError(RequestFailed):
    """500: the server failed at this request."""


class Unavailable(RequestFailed):
    """503: no server is there that takes requests now."""


class ConnectionLost(Unavailable):
    """503: the connection broke before the answer was whole. What has arrived is right as far as it goes."""


_BY_STATUS: dict[int, type[RequestFailed]] = {
    401: AuthenticationFailed,
    408: DeadlineExceeded,
    409: Conflict,
    429: Overloaded,
    499: Cancelled,
    503: Unavailable,
}


def error_of(failed: Failed) -> RequestFailed:
    """What to raise for a failure that the server reports."""
    other = BadRequest if 400 <= failed.status < 500 else ServerError
    return _BY_STATUS.get(failed.status, other)(failed)


def unavailable(request_id: int, message: str) -> Unavailable:
    return Unavailable(_engine_unavailable(request_id, message))


def connection_lost(request_id: int, message: str) -> ConnectionLost:
    return ConnectionLost(_engine_unavailable(request_id, message))


def bad_request(request_id: int, message: str, param: str | None, code: str | None = None) -> BadRequest:
    return BadRequest(Failed(request_id, 400, message, "invalid_request_error", param, code))


def deadline_exceeded(request_id: int, seconds: float) -> DeadlineExceeded:
    reason = f"the deadline of {seconds:g} s passed before the answer was whole"
    return DeadlineExceeded(Failed(request_id, 408, reason, "timeout_error", "deadline", "deadline_exceeded"))


def cancelled(request_id: int) -> Cancelled:
    return Cancelled(Failed(request_id, 499, "the request was cancelled", "cancelled_error", code="cancelled"))


def authentication_failed(message: str) -> AuthenticationFailed:
    return AuthenticationFailed(Failed(0, 401, message, "authentication_error", code="invalid_key"))


def _engine_unavailable(request_id: int, message: str) -> Failed:
    return Failed(request_id, 503, message, "server_error", code="engine_unavailable", retry_after=1.0)
