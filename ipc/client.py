"""The client SDK: an engine for services, over ZeroMQ, without HTTP.

    async with AsyncClient("ipc:///run/tokenmill.sock") as client:
        answer = await client.generate("Once upon a time", max_tokens=20)
        async for chunk in client.stream([{"role": "user", "content": "Name three rivers."}], deadline=10):
            print(chunk.text, end="")

`blocking.Client` is the same for code without asyncio. Both keep one connection for any number of requests, and connect
again by themselves when the server has been restarted. Errors are `errors.RequestFailed` and its kinds.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypedDict, Unpack

from .addresses import check_addresses
from .calls import Call, Patience
from .codec import unpack_ints
from .curve import ClientKeys
from .engine_client import EMBEDDING_PARAMS, EngineClient, Prompt, RequestOptions, Route
from .errors import BadRequest, bad_request, cancelled, unavailable
from .inputs import (
    CallOptions,
    GenerateOptions,
    PromptLike,
    as_params,
    as_prompt,
    as_token_ids,
    check_keywords,
    split_options,
)
from .key_files import check_server_key, read_key_file
from .messages import Detokenize, Finished, ModelInfo, Pooling, SamplingParams, Tokenize, Tokenized, TokenPrompt
from .results import Chunk, Collector, Completion, Embedding, Score, Tokens, chunk_of, embedding_of, score_of
from .stream import Stream
from .validation import MAX_LOGPROBS, POOLINGS, InvalidRequest, validate, validate_detokenize, validate_tokenize

DEFAULT_RETRIES = 2
DEFAULT_TIMEOUT = 60.0  # seconds


class ClientOptions(TypedDict, total=False):
    """What a client may be told besides its address; see `AsyncClient`."""

    key: str | Path | None
    server_key: str | None
    deadline: float | None
    retries: int


class CompletionStream:
    """An answer as it comes; iterate over it once, which sends the request. Leaving the loop aborts it.

    With `async with` it is aborted at the end of the block. Raises `RequestFailed`; `Cancelled`, if it was aborted by
    somebody else.
    """

    def __init__(self, call: Call, choices: int) -> None:
        self._call = call
        self._choices = choices
        self._batches = call.batches()
        self._collector = Collector()

    @property
    def attempts(self) -> int:
        """How often the request has been sent."""
        return self._call.attempts

    async def next_chunks(self) -> list[Chunk] | None:
        """What has arrived together, maybe nothing to show yet; None at the end."""
        items = await anext(self._batches, None)
        if items is None:
            return None
        self._collector.add(items)
        return [chunk for item in items if (chunk := chunk_of(item)) is not None]

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            while (chunks := await self.next_chunks()) is not None:
                for chunk in chunks:
                    yield chunk
        finally:
            self.abort()

    async def completion(self) -> Completion:
        """The whole answer, what has been iterated over included. `Cancelled` when it was left before its end."""
        try:
            while (items := await anext(self._batches, None)) is not None:
                self._collector.add(items)
        finally:
            self.abort()
        whole = self._collector.completion(self._choices, self._call.attempts, self._call.prompt)
        if whole is None:
            raise cancelled(0)
        return whole

    def abort(self) -> None:
        """End the request. Does nothing once it has ended."""
        self._call.abort()

    async def __aenter__(self) -> "CompletionStream":
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.abort()


class AsyncClient:
    """The asyncio client. All methods belong to one event loop of one process; RuntimeError elsewhere.

    `address`: where a server listens for clients (`--sdk-listen`, or what its stderr names), `ipc://PATH` or
    `tcp://HOST:PORT`; several, where it has several tokenizer processes. `key`: the file of this client's key pair,
    and `server_key` the server's public key, for a server that asks for keys. `deadline` (seconds) and `retries` are
    those of calls that do not say. ValueError for what of this cannot be used.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        key: str | Path | None = None,
        server_key: str | None = None,
        deadline: float | None = None,
        retries: int = DEFAULT_RETRIES,
    ) -> None:
        if (key is None) != (server_key is None):
            raise ValueError("key and server_key: a client that proves itself has to know the server too: give both")
        keys = None
        if key is not None and server_key is not None:
            keys = ClientKeys(read_key_file(key), check_server_key(server_key))
        self._engine = EngineClient(check_addresses(address), keys)
        try:
            Patience(self._engine, deadline, retries)
        except BadRequest as error:
            raise ValueError(error.message) from None
        self._deadline = deadline
        self._retries = retries

    async def connect(self, timeout: float | None = DEFAULT_TIMEOUT) -> ModelInfo:
        """Wait until a server is ready, at most `timeout` seconds. Calls would do so themselves.

        `AuthenticationFailed` when it does not know this client's key, `Unavailable` when there is none by then.
        """
        try:
            return await self._engine.connect(timeout)
        except TimeoutError:
            raise unavailable(0, f"no server was ready within {timeout:g} s") from None

    @property
    def model(self) -> ModelInfo | None:
        """What is served; None while no server is there."""
        return self._engine.model

    @property
    def live_requests(self) -> int:
        return self._engine.live_requests

    def stream(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> CompletionStream:
        """An answer as it comes. Keywords are those of `SamplingParams` (they win over `params`) and `CallOptions`."""
        sampling, others = split_options(options)
        params = as_params(params, sampling)
        return CompletionStream(self._generation(as_prompt(prompt), params, others), params.n)

    async def generate(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer; see `stream`. Cancelling the task aborts the request. Raises `RequestFailed`."""
        return await self.stream(prompt, params, **options).completion()

    async def embed(self, prompt: PromptLike, pooling: Pooling = "", **options: Unpack[CallOptions]) -> Embedding:
        """A text, token ids or a chat as a vector. `pooling`: "last", "mean" or "cls"; empty: what suits the model."""
        check_keywords(options)
        if not isinstance(pooling, str):
            raise bad_request(0, f"pooling must be one of {', '.join(POOLINGS)}", "pooling")
        message = as_prompt(prompt)

        def start(request: RequestOptions, route: Route) -> Stream:
            self._check(lambda model: validate(message, EMBEDDING_PARAMS, model))
            return self._engine.start_embedding(message, pooling, route=route, **request)

        call = self._call(start, options)
        async for items in call.batches():
            for item in items:
                if isinstance(item, Finished):
                    return embedding_of(item, call.attempts)
        raise cancelled(0)

    async def score(self, prompt: PromptLike, top: int = 0, **options: Unpack[CallOptions]) -> Score:
        """Log-probabilities that the model gives the tokens of a prompt, and of the `top` best ones at each place."""
        check_keywords(options)
        if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_LOGPROBS:
            raise bad_request(0, f"top must be an integer between 0 and {MAX_LOGPROBS}", "top")
        params = as_params(None, {"max_tokens": 0, "prompt_logprobs": top})
        call = self._generation(as_prompt(prompt), params, options)
        async for _ in call.batches():
            pass
        if call.prompt is None:
            raise cancelled(0)
        return score_of(call.prompt)

    async def tokenize(
        self,
        prompt: PromptLike,
        *,
        add_special_tokens: bool = True,
        return_token_strs: bool = False,
        deadline: float | None = None,
    ) -> Tokens:
        """Token ids of a text or a chat, which may be longer than the context.

        `add_special_tokens`: such as a begin-of-sequence token; chat templates write theirs themselves.
        """
        message = as_prompt(prompt)
        if isinstance(message, TokenPrompt):
            raise bad_request(0, "prompt: these are token ids already", "prompt")
        for name, flag in (("add_special_tokens", add_special_tokens), ("return_token_strs", return_token_strs)):
            if not isinstance(flag, bool):
                raise bad_request(0, f"{name} must be true or false", name)

        async def ask() -> Tokenized:
            self._check(lambda model: validate_tokenize(Tokenize(0, message), model))
            return await self._engine.tokenize(
                message, add_special_tokens=add_special_tokens, return_token_strs=return_token_strs
            )

        answer = await self._patience(deadline).question(ask)
        return Tokens(tuple(unpack_ints(answer.token_ids)), answer.token_strs)

    async def detokenize(self, token_ids: Iterable[int], *, deadline: float | None = None) -> str:
        """The text of token ids, special tokens written out."""
        message = Detokenize(0, as_token_ids(token_ids))

        async def ask() -> str:
            self._check(lambda model: validate_detokenize(message, model))
            return await self._engine.detokenize(unpack_ints(message.token_ids))

        return await self._patience(deadline).question(ask)

    def _patience(self, deadline: float | None) -> Patience:
        return Patience(self._engine, self._deadline if deadline is None else deadline, self._retries)

    def _generation(self, prompt: Prompt, params: SamplingParams, options: CallOptions) -> Call:
        def start(request: RequestOptions, route: Route) -> Stream:
            self._check(lambda model: validate(prompt, params, model))
            return self._engine.generate(prompt, params, route=route, **request)

        return self._call(start, options)

    def _call(self, start: Callable[[RequestOptions, Route], Stream], options: CallOptions) -> Call:
        request = dict(options)
        retries = request.pop("retries", self._retries)
        deadline = request.pop("deadline", self._deadline)
        patience = Patience(self._engine, deadline, retries)  # type: ignore[arg-type]  # it checks them
        return Call(start, patience, request)  # type: ignore[arg-type]

    def _check(self, check: Callable[[ModelInfo], None]) -> None:
        """`BadRequest` for what no server would take; something large would break the connection, for all calls."""
        if self._engine.model is not None:
            try:
                check(self._engine.model)
            except InvalidRequest as error:
                raise bad_request(0, error.message, error.param, error.code) from None

    async def close(self) -> None:
        """Abort what runs (whoever waits gets `Cancelled`) and disconnect."""
        await self._engine.close()

    async def __aenter__(self) -> "AsyncClient":
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
