"""The routes of the Messages API."""

from aiohttp import web

from ..body import decode_body, read_body
from ..errors import ApiError
from ..handlers import generate
from ..middleware import note_ignored
from ..parsers import PlainParser
from ..requests import chat_job
from ..service import SERVICE
from .protocol import messages_decoder
from .render import MessagesRenderer
from .request import ignored, translate


async def create_message(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages"""
    service = request.app[SERVICE]
    model = service.model_for_new_request()
    body, unknown = decode_body(await read_body(request, service.max_body_bytes), messages_decoder)
    note_ignored(request, ignored(body) + unknown)
    chat, names = translate(body)
    try:
        job = chat_job(chat, model)
        return await generate(request, job, MessagesRenderer(job, names, PlainParser()))
    except ApiError as error:
        raise names.translate(error) from None
