"""Reading a request's body: bounded in size, depth and time, and decoded into a typed struct."""

import asyncio
import re
from codecs import BOM_UTF8
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from .errors import ApiError
from .mismatch import invalid_body
from .service import SERVICE
from .unknown import unknown_fields

T = TypeVar("T")

MAX_DEPTH = 64  # of nested arrays and objects

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


async def read_body(request: web.Request, limit: int) -> bytes:
    """The body, read as it arrives; 413 as soon as it is known to exceed `limit` bytes, 408 when it takes too long."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not supported: send the body without Content-Encoding")
    if coding := _unknown_coding(request):
        raise ApiError(415, f"the transfer coding {coding[:64]!r} is not supported: send the body as it is, or chunked")
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)
    data = bytearray()
    seconds = request.app[SERVICE].client_timeout
    try:
        async with asyncio.timeout(seconds):
            async for part in request.content.iter_any():
                data += part
                if len(data) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None
    except (HttpProcessingError, web.RequestPayloadError):
        raise ApiError(400, "the body's transfer encoding is broken") from None
    return bytes(data)


def _unknown_coding(request: web.Request) -> str | None:
    """A transfer coding besides `chunked`, of which nobody would undo what it does. RFC 9112, section 6.1."""
    given = ",".join(request.headers.getall("Transfer-Encoding", ())).split(",")
    return next((coding for name in given if (coding := name.strip()).lower() not in ("", "chunked", "identity")), None)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body exceeds the limit of {limit} bytes", code="request_too_large")


def decode_body(data: bytes, decoder: msgspec.json.Decoder[T]) -> tuple[T, list[str]]:
    """The typed body, and the names of fields that its type does not know."""
    if data.startswith(BOM_UTF8):  # RFC 8259, section 8.1, forbids it
        raise ApiError(400, "the body begins with a byte order mark: send UTF-8 without one")
    if not data or data.isspace():
        raise ApiError(400, "the body is empty: it must be a JSON object")
    check_depth(data)
    try:
        data.decode()  # the decoder does not look into strings of fields that it skips
        body = decoder.decode(data)
        return body, unknown_fields(data, type(body))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 (byte {error.start})") from None
    except msgspec.ValidationError as error:
        raise invalid_body(error, decoder.type) from None
    except RecursionError:
        raise _too_deep() from None  # brackets that are never closed
    except msgspec.DecodeError as error:
        if b"\0" in data[:4]:
            raise ApiError(400, "the body is not UTF-8: it seems to be UTF-16 or UTF-32") from None
        raise ApiError(400, f"the body is not valid JSON, or holds an unpaired surrogate: {error}") from None


def check_depth(data: bytes) -> None:
    """400 when arrays and objects nest deeper than `MAX_DEPTH`.

    Strings are cut out, and of the brackets left each pass removes the innermost pairs. All of it runs at the speed of
    `bytes`, since a body may have millions of brackets; unbalanced ones are left for the parser to refuse.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", data).translate(_BRACKETS, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if b"[]" not in brackets:
            break
        brackets = brackets.replace(b"[]", b"")
    if b"[]" in brackets:
        raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, f"the body nests deeper than {MAX_DEPTH} levels")
