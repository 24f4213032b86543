"""POST /tokenize and /detokenize, in vLLM's form."""

import msgspec
from aiohttp import web
from msgspec import Struct

from ipc.codec import pack_ints, unpack_ints
from ipc.errors import RequestFailed
from ipc.messages import ChatPrompt, Detokenize, ModelInfo, TextPrompt, Tokenize, Tokenized
from ipc.validation import InvalidRequest, validate_detokenize, validate_tokenize

from .answers import json_response
from .errors import ApiError
from .protocol import Message
from .received import receive
from .requests import Job, chat_prompt, check_model
from .service import SERVICE, Service


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # null: true for a prompt, false for messages, whose template adds them
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(Struct):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: web.Request) -> web.StreamResponse:
    """POST /tokenize: of messages, the tokens of what the chat template makes of them."""
    body, model = await receive(request, _tokenize_decoder, generates=False)
    if body.model is not None:
        check_model(body.model, model)
    prompt = _prompt(body)
    special = isinstance(prompt, TextPrompt) if body.add_special_tokens is None else body.add_special_tokens
    answer = await ask(
        request.app[SERVICE], prompt, add_special_tokens=special, return_token_strs=bool(body.return_token_strs)
    )
    tokens = list(unpack_ints(answer.token_ids))
    strings = list(answer.token_strs) if body.return_token_strs else None
    return json_response(
        TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=model.max_model_len, token_strs=strings)
    )


async def ask(
    service: Service, prompt: TextPrompt | ChatPrompt, *, add_special_tokens: bool, return_token_strs: bool = False
) -> Tokenized:
    """The tokens of a prompt; `ApiError` for one that cannot be had or is too long."""
    try:
        validate_tokenize(Tokenize(0, prompt), service.model())
        return await service.client.tokenize(
            prompt, add_special_tokens=add_special_tokens, return_token_strs=return_token_strs
        )
    except InvalidRequest as error:
        raise ApiError.of_invalid(error) from None
    except RequestFailed as error:
        raise ApiError.of_failed(error.failed) from None


async def count_chat(service: Service, job: Job) -> int:
    """Tokens that the prompt of a chat job has, whatever its length."""
    (prompt,) = job.prompts
    assert isinstance(prompt, ChatPrompt)
    answer = await ask(service, prompt, add_special_tokens=False)
    return len(answer.token_ids) // 4


def _prompt(body: TokenizeRequest) -> TextPrompt | ChatPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "one of prompt and messages is required, and not both", param="prompt")
    if body.prompt is not None:
        return TextPrompt(body.prompt)
    return chat_prompt(body.messages or [], body.add_generation_prompt, body.continue_final_message)


async def detokenize(request: web.Request) -> web.StreamResponse:
    """POST /detokenize: special tokens are written out, so that tokens of a chat show its rendered prompt."""
    body, model = await receive(request, _detokenize_decoder, generates=False)
    if body.model is not None:
        check_model(body.model, model)
    _check_ids(body.tokens, model)
    try:
        text = await request.app[SERVICE].client.detokenize(body.tokens)
    except RequestFailed as error:
        raise ApiError.of_failed(error.failed) from None
    return json_response(DetokenizeResponse(text))


def _check_ids(tokens: list[int], model: ModelInfo) -> None:
    try:
        validate_detokenize(Detokenize(0, pack_ints(tokens)), model)
    except OverflowError:
        raise ApiError(400, "tokens: a token id does not fit 32 bits", param="tokens") from None
    except InvalidRequest as error:
        raise ApiError.of_invalid(error) from None
