"""The routes of the Messages API."""

import msgspec
from aiohttp import web

from ..body import decode_body, read_body
from ..errors import ApiError
from ..handlers import generate, json_response
from ..middleware import note_ignored
from ..requests import chat_job
from ..service import SERVICE
from ..tokenize import count_chat
from .objects import TokenCount
from .protocol import count_tokens_decoder, messages_decoder
from .render import MessagesRenderer
from .request import ignored, translate, translate_prompt


async def create_message(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages"""
    service = request.app[SERVICE]
    model = service.model_for_new_request()
    body, unknown = decode_body(await read_body(request, service.max_body_bytes), messages_decoder)
    note_ignored(request, ignored(body, model) + unknown)
    chat, names = translate(body, model)
    try:
        job = chat_job(chat, model)
        return await generate(request, job, MessagesRenderer(job, names, job.output_format.parser()))
    except ApiError as error:
        raise names.translate(error) from None


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens"""
    service = request.app[SERVICE]
    model = service.model()
    body, unknown = decode_body(await read_body(request, service.max_body_bytes), count_tokens_decoder)
    note_ignored(request, ignored(body, model) + unknown)
    chat, names = translate_prompt(body, model)
    try:
        count = await count_chat(service, chat_job(chat, model))
    except ApiError as error:
        raise names.translate(error) from None
    return json_response(msgspec.json.encode(TokenCount(count)))
