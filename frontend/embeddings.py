"""POST /v1/embeddings: hidden states of each input, pooled as suits the model, of length 1."""

import asyncio
import base64
import re

from aiohttp import web
from msgspec import structs

from config.tenants import namespace_of
from ipc.codec import unpack_floats
from ipc.engine_client import EMBEDDING_PARAMS, EngineClient, RequestOptions
from ipc.errors import RequestFailed
from ipc.messages import Finished, ModelInfo, TextPrompt, TokenPrompt
from ipc.validation import InvalidRequest, check_characters, validate_options, validate_prompt

from .answers import json_response
from .errors import ApiError
from .protocol import Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage, embedding_decoder
from .received import receive
from .requests import MAX_SALT, check_model, prompts_of
from .service import SERVICE
from .tenant import tenant_of
from .timelines import RequestTimeline
from .together import check_together

_PROMPT = re.compile(r"^(?:prompt: )?(?:the )?prompt\b")
_COUNT = re.compile(r"prompt has (\d+) tokens")


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings"""
    body, model = await receive(request, embedding_decoder)
    inputs = _inputs(body, model)
    service = request.app[SERVICE]
    service.model_for_new_request()  # a drain may have begun while the body was read
    tenant = tenant_of(request)
    options: RequestOptions = {
        "external_id": request["id"],
        "priority": body.priority or 0,
        "tenant": tenant,
        "namespace": namespace_of(tenant, body.cache_salt or ""),
    }
    with service.running():
        await check_together(service.client, inputs, 1, "input")
        names = _names(body)
        tasks = [
            asyncio.ensure_future(_embed(service.client, prompt, name, options))
            for prompt, name in zip(inputs, names, strict=True)
        ]
        ends: dict[int, Finished] = {}
        timeline = RequestTimeline(request["id"], request["arrival"], len(inputs), ends)
        try:
            answers = await asyncio.gather(*tasks)
            ends.update(enumerate(structs.replace(answer, embedding=b"") for answer in answers))
        except ApiError as error:
            timeline.fail(error)
            raise
        finally:
            # Also reached when the client leaves, or one of several fails.
            for task in tasks:
                task.cancel()
            timeline.end(request.path)
            service.ended(timeline)
    return json_response(_answer(body, answers))


def _inputs(body: EmbeddingRequest, model: ModelInfo) -> tuple[TextPrompt | TokenPrompt, ...]:
    check_model(body.model, model)
    if body.dimensions is not None:
        raise ApiError(400, "dimensions is not supported: this model's embeddings have one size", param="dimensions")
    inputs = prompts_of(body.input, "input")
    try:
        validate_options(priority=body.priority or 0)
        check_characters("cache_salt", body.cache_salt or "", MAX_SALT)
    except InvalidRequest as error:
        raise ApiError.of_invalid(error) from None
    for prompt, name in zip(inputs, _names(body), strict=True):
        try:
            validate_prompt(prompt, EMBEDDING_PARAMS, model)
        except InvalidRequest as error:
            raise _renamed(ApiError.of_invalid(error), name, model.max_model_len) from None
    return inputs


def _names(body: EmbeddingRequest) -> list[str]:
    """What each input is called in errors: by its index where there are several."""
    if isinstance(body.input, str) or isinstance(body.input[0], int):
        return ["input"]
    return [f"input[{index}]" for index in range(len(body.input))]


async def _embed(
    client: EngineClient, prompt: TextPrompt | TokenPrompt, name: str, options: RequestOptions
) -> Finished:
    try:
        return await client.embed(prompt, **options)
    except RequestFailed as error:
        context = client.model.max_model_len if client.model is not None else None
        raise _renamed(ApiError.of_failed(error.failed), name, context) from None


def _renamed(error: ApiError, name: str, context: int | None) -> ApiError:
    """The engine speaks of a prompt, and of the one token that it counts as its output."""
    body = error.body
    if body.param not in ("prompt", "max_tokens"):
        return error
    if body.code == "context_length_exceeded" and context is not None:
        count = _COUNT.search(body.message)
        body.message = f"{name} may have at most {context - 1} tokens" + (f", not {count[1]}" if count else "")
    else:
        body.message = _PROMPT.sub(lambda _: name, body.message, count=1)
    body.param = name
    return error


def _answer(body: EmbeddingRequest, answers: list[Finished]) -> EmbeddingResponse:
    base64_wanted = body.encoding_format == "base64"
    data = [
        Embedding(
            index,
            base64.b64encode(answer.embedding).decode() if base64_wanted else list(unpack_floats(answer.embedding)),
        )
        for index, answer in enumerate(answers)
    ]
    tokens = sum(answer.prompt_tokens for answer in answers)
    return EmbeddingResponse(data, body.model, EmbeddingUsage(tokens, tokens))
