"""OpenAI's routes."""

import msgspec
from aiohttp import web

from ipc.messages import ModelInfo

from .body import decode_body, read_body
from .errors import ApiError
from .generation import Generation
from .middleware import note_ignored
from .protocol import Model, ModelList, chat_decoder, completion_decoder
from .requests import Job, chat_job, completion_job
from .responses import ChatResponder, CompletionResponder, Responder
from .service import SERVICE
from .streaming import KeepAlive, stream_answer
from .tenant import tenant_of

KEEP_ALIVE: web.AppKey[KeepAlive] = web.AppKey("keep_alive", KeepAlive)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    service = request.app[SERVICE]
    model = service.model_for_new_request()
    body, unknown = decode_body(await read_body(request, service.max_body_bytes), chat_decoder)
    note_ignored(request, unknown)
    job = chat_job(body, model)
    return await _generate(request, job, ChatResponder(job, service.fingerprint))


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    service = request.app[SERVICE]
    model = service.model_for_new_request()
    body, unknown = decode_body(await read_body(request, service.max_body_bytes), completion_decoder)
    note_ignored(request, unknown)
    job = completion_job(body, model)
    return await _generate(request, job, CompletionResponder(job, service.fingerprint))


async def _generate(request: web.Request, job: Job, responder: Responder) -> web.StreamResponse:
    service = request.app[SERVICE]
    service.model_for_new_request()  # a drain may have begun while the body was read
    with service.running():
        tenant = tenant_of(request.headers.get("Authorization"))
        generation = Generation(service.client, job, request["id"], service.metrics, tenant)
        responder.prompt_of = generation.prompt_of
        try:
            if job.stream:
                return await stream_answer(request, generation, responder, request.app[KEEP_ALIVE])
            batches = [batch async for batch in generation.batches()]
            return _json(responder.whole(batches, generation.usage()))
        finally:
            # Also reached when the client leaves: aiohttp then cancels this handler.
            generation.close()


async def list_models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models"""
    model = request.app[SERVICE].model()
    return _json(msgspec.json.encode(ModelList([_describe(name, model) for name in model.names])))


async def get_model(request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{id}"""
    model = request.app[SERVICE].model()
    name = request.match_info["id"]
    if name not in model.names:
        raise ApiError(
            404,
            f"the model {name[:200]!r} is not served here; served: {', '.join(model.names)}",
            param="model",
            code="model_not_found",
        )
    return _json(msgspec.json.encode(_describe(name, model)))


def _describe(name: str, model: ModelInfo) -> Model:
    return Model(name, model.created, model.max_model_len)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
