"""The routes of the Messages API."""

from aiohttp import web

from ..answers import json_response
from ..errors import ApiError
from ..handlers import generate
from ..middleware import note_ignored
from ..received import receive
from ..requests import chat_job
from ..service import SERVICE
from ..tokenize import count_chat
from .objects import TokenCount
from .protocol import count_tokens_decoder, messages_decoder
from .render import MessagesRenderer
from .request import ignored, translate, translate_prompt


async def create_message(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages"""
    body, model = await receive(request, messages_decoder)
    note_ignored(request, ignored(body, model))
    chat, names = translate(body, model)
    try:
        job = chat_job(chat, model)
        return await generate(request, job, MessagesRenderer(job, names, job.output_format.parser()))
    except ApiError as error:
        raise names.translate(error) from None


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens"""
    body, model = await receive(request, count_tokens_decoder, generates=False)
    note_ignored(request, ignored(body, model))
    chat, names = translate_prompt(body, model)
    try:
        count = await count_chat(request.app[SERVICE], chat_job(chat, model))
    except ApiError as error:
        raise names.translate(error) from None
    return json_response(TokenCount(count))
