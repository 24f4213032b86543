"""OpenAI's routes."""

import asyncio

from aiohttp import web

from ipc.messages import ModelInfo

from .answers import encoded_response, json_response
from .errors import ApiError
from .generation import Batch, Generation
from .middleware import note_ignored
from .parsed_responses import chat_responder
from .protocol import Model, ModelList, chat_decoder, completion_decoder
from .received import receive
from .rendering import Renderer
from .request_spans import spans_of
from .requests import Job, chat_job, check_model, completion_job, ignored
from .responses import CompletionResponder
from .route import pattern_of
from .service import SERVICE
from .streaming import KeepAlive, stream_answer
from .tenant import tenant_of
from .timelines import wants_timings
from .together import check_together

KEEP_ALIVE: web.AppKey[KeepAlive] = web.AppKey("keep_alive", KeepAlive)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    body, model = await receive(request, chat_decoder)
    note_ignored(request, ignored(body, model))
    job = chat_job(body, model)
    return await generate(request, job, chat_responder(job, request.app[SERVICE].fingerprint))


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    body, model = await receive(request, completion_decoder)
    note_ignored(request, ignored(body, model))
    job = completion_job(body, model)
    return await generate(request, job, CompletionResponder(job, request.app[SERVICE].fingerprint))


async def generate(request: web.Request, job: Job, renderer: Renderer) -> web.StreamResponse:
    """Run a job and answer with its outputs in the form of `renderer`, streamed or whole."""
    service = request.app[SERVICE]
    service.model_for_new_request()  # a drain may have begun while the body was read
    tells_timings = wants_timings(request, measures=service.measures)
    with service.running():
        await check_together(service.client, job.prompts, job.params.n, "prompt", job.params.prompt_logprobs)
        tenant, route = tenant_of(request), pattern_of(request)
        arrival = request["arrival"]
        generation = Generation(service.client, job, request["id"], service.metrics, tenant, route, arrival)
        renderer.prompt_of = generation.prompt_of
        if tells_timings:
            renderer.tell_timings(generation.timeline.timings)
        try:
            if job.stream:
                return await stream_answer(request, generation, renderer, request.app[KEEP_ALIVE])
            batches: list[Batch] = []
            await generation.deliver(batches.append)
            usage = generation.usage()
            if job.params.logprobs is None and job.params.prompt_logprobs is None:
                return encoded_response(renderer.whole(batches, usage))
            # Millions of values take seconds, in which other streams must go on.
            return encoded_response(await asyncio.to_thread(renderer.whole, batches, usage))
        except ApiError as error:
            generation.timeline.fail(error)
            raise
        finally:
            # Also reached when the client leaves: aiohttp then cancels this handler.
            generation.close()
            generation.timeline.end(request.path)
            service.ended(generation.timeline)
            if service.spans is not None:
                span = spans_of(generation.timeline, job, service.served_names[0])
                service.spans.send(span, request.headers)


async def list_models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models"""
    model = request.app[SERVICE].model()
    return json_response(ModelList([_describe(name, model) for name in model.names]))


async def get_model(request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{id}"""
    model = request.app[SERVICE].model()
    name = request.match_info["id"]
    check_model(name, model)
    return json_response(_describe(name, model))


def _describe(name: str, model: ModelInfo) -> Model:
    return Model(name, model.created, model.max_model_len, pooling=model.pooling)
