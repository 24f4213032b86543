"""Responses of JSON."""

import msgspec
from aiohttp import web
from msgspec import Struct


def json_response(answer: Struct) -> web.Response:
    """The response with this answer."""
    return encoded_response(msgspec.json.encode(answer))


def encoded_response(body: bytes) -> web.Response:
    """The response with this JSON."""
    return web.Response(body=body, content_type="application/json")
