"""The routes of the Responses API."""

from aiohttp import web

from ..answers import json_response
from ..errors import ApiError
from ..middleware import note_ignored
from ..received import receive
from ..translated import answer, count
from .objects import InputTokens
from .protocol import responses_decoder
from .render import ResponsesRenderer
from .request import ignored, translate


async def create_response(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses"""
    body, model = await receive(request, responses_decoder)
    note_ignored(request, ignored(body, model))
    chat, names = translate(body, model)
    return await answer(
        request, chat, names, model, lambda job: ResponsesRenderer(job, body, names, job.output_format.parser())
    )


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/input_tokens: of the request that this is the body of."""
    body, model = await receive(request, responses_decoder, generates=False)
    note_ignored(request, ignored(body, model))
    chat, names = translate(body, model)
    return json_response(InputTokens(await count(request, chat, names, model)))


async def stored_response(request: web.Request) -> web.StreamResponse:
    """Any request about a response that was made before."""
    name = request.match_info["id"].partition("/")[0]
    raise ApiError(404, f"there is no response {name[:200]!r}: responses are not stored here", code="not_found")
