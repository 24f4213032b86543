"""The routes of the Messages API."""

from aiohttp import web

from ..answers import json_response
from ..middleware import note_ignored
from ..received import receive
from ..translated import answer, count
from .objects import TokenCount
from .protocol import count_tokens_decoder, messages_decoder
from .render import MessagesRenderer
from .request import ignored, translate, translate_prompt


async def create_message(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages"""
    body, model = await receive(request, messages_decoder)
    note_ignored(request, ignored(body, model))
    chat, names = translate(body, model)
    return await answer(
        request, chat, names, model, lambda job: MessagesRenderer(job, names, job.output_format.parser())
    )


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens"""
    body, model = await receive(request, count_tokens_decoder, generates=False)
    note_ignored(request, ignored(body, model))
    chat, names = translate_prompt(body, model)
    return json_response(TokenCount(await count(request, chat, names, model)))
