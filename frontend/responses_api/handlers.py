"""The routes of the Responses API."""

from aiohttp import web

from ..answers import json_response
from ..errors import ApiError
from ..handlers import generate
from ..middleware import note_ignored
from ..received import receive
from ..requests import chat_job
from ..service import SERVICE
from ..tokenize import count_chat
from .objects import InputTokens
from .protocol import responses_decoder
from .render import ResponsesRenderer
from .request import ignored, translate


async def create_response(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses"""
    body, model = await receive(request, responses_decoder)
    note_ignored(request, ignored(body, model))
    chat, names = translate(body, model)
    try:
        job = chat_job(chat, model)
        return await generate(request, job, ResponsesRenderer(job, body, names, job.output_format.parser()))
    except ApiError as error:
        raise names.translate(error) from None


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/input_tokens: of the request that this is the body of."""
    body, model = await receive(request, responses_decoder, generates=False)
    note_ignored(request, ignored(body, model))
    chat, names = translate(body, model)
    try:
        count = await count_chat(request.app[SERVICE], chat_job(chat, model))
    except ApiError as error:
        raise names.translate(error) from None
    return json_response(InputTokens(count))


async def stored_response(request: web.Request) -> web.StreamResponse:
    """Any request about a response that was made before."""
    name = request.match_info["id"].partition("/")[0]
    raise ApiError(404, f"there is no response {name[:200]!r}: responses are not stored here", code="not_found")
