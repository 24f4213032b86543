"""Requests of other APIs, once they have been translated into a chat request."""

from collections.abc import Callable

from aiohttp import web

from ipc.messages import ModelInfo

from .errors import ApiError
from .handlers import generate
from .protocol import ChatRequest
from .rendering import Renderer
from .requests import Job, chat_job
from .service import SERVICE
from .tokenize import count_chat
from .translation import Names


async def answer(
    request: web.Request, chat: ChatRequest, names: Names, model: ModelInfo, renderer: Callable[[Job], Renderer]
) -> web.StreamResponse:
    """Generate, and answer in the form of the renderer. `ApiError` in the client's words."""
    try:
        job = chat_job(chat, model)
        return await generate(request, job, renderer(job))
    except ApiError as error:
        raise names.translate(error) from None


async def count(request: web.Request, chat: ChatRequest, names: Names, model: ModelInfo) -> int:
    """Tokens of its prompt. `ApiError` in the client's words."""
    try:
        return await count_chat(request.app[SERVICE], chat_job(chat, model))
    except ApiError as error:
        raise names.translate(error) from None
