"""How the tokenizer process says that a request failed."""

import logging
import traceback

import msgspec

from ipc.messages import Failed
from ipc.validation import InvalidRequest

from .idempotency import KeyConflict

log = logging.getLogger(__name__)

_TYPES = {400: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 429: "rate_limit_error"}


def failed(request_id: int, status: int, message: str, param: str | None = None, code: str | None = None) -> Failed:
    """The message to a client, shaped like the HTTP error object."""
    retry_after = 1.0 if status in (429, 503) else None
    return Failed(request_id, status, message, _TYPES.get(status, "server_error"), param, code, retry_after)


def explained(request_id: int, error: Exception) -> Failed:
    """What a client is told of an error; one that is not its own fault is logged."""
    if isinstance(error, InvalidRequest):
        return failed(request_id, 400, error.message, error.param, error.code)
    if isinstance(error, KeyConflict):
        conflict = failed(request_id, 409, error.message, "idempotency_key", error.code)
        return msgspec.structs.replace(conflict, retry_after=error.retry_after)
    # The text of an unexpected error may quote the prompt, which does not belong in logs; its place does.
    place = "".join(traceback.format_tb(error.__traceback__)[-1:]).strip()
    log.error("a request failed: %s: %s", type(error).__name__, place)
    return failed(request_id, 500, "the request could not be processed", code="internal_error")
