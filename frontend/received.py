"""What a request to one of the APIs says: its typed body, for a model that is there."""

from typing import TypeVar, cast

import msgspec
from aiohttp import web

from ipc.messages import ModelInfo

from .body import decode_body, read_body
from .connection import Connection
from .middleware import note_ignored
from .service import SERVICE

T = TypeVar("T")


async def receive(
    request: web.Request, decoder: msgspec.json.Decoder[T], *, generates: bool = True
) -> tuple[T, ModelInfo]:
    """Read and decode the body, note when its last bytes came in, and name its unknown fields in the response's header.

    503 without a model, or while draining if the request `generates`; `body` says what else is refused.
    """
    service = request.app[SERVICE]
    model = service.model_for_new_request() if generates else service.model()
    data = await read_body(request, service.max_body_bytes)
    # Not now: the client has waited since then for this process to parse what it sent, and to come to it.
    request["arrival"] = cast(Connection, request.protocol).received
    body, unknown = decode_body(data, decoder)
    note_ignored(request, unknown)
    return body, model
