"""Client of the engine over ZeroMQ: what the HTTP frontend uses, and what services inside a company use without HTTP.

    client = AsyncClient(["ipc:///run/.../clients-0"])
    await client.connect()
    async for items in client.generate(TextPrompt("Once upon a time"), SamplingParams(max_tokens=20)):
        ...

`Client` is the blocking face of the same thing.
"""

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from .channels import AsyncDealer
from .codec import Decoder, pack_ints
from .messages import (
    Abort,
    ChatPrompt,
    Delta,
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    Generate,
    Hello,
    ModelInfo,
    Outputs,
    Pooling,
    PromptInfo,
    SamplingParams,
    TextPrompt,
    ToClient,
    Tokenize,
    Tokenized,
    TokenPrompt,
    Welcome,
)
from .validation import InvalidRequest, check_pooling, validate_options, validate_params

Prompt = TextPrompt | ChatPrompt | TokenPrompt
T = TypeVar("T")
A = TypeVar("A", Tokenized, Detokenized)
_AT_ONCE = 64  # streams that are handed what has arrived before the loop goes on
# What a request for an embedding says in the place of how to sample.
EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class RequestOptions(TypedDict, total=False):
    """What a request may say besides its prompt and how to sample; all of it is optional.

    `external_id`: the client's own name for the request, for logs. `priority`: lower goes first, under the server's
    priority policy. `ttft_target_ms`: refuse the request at once (429) when its first token is predicted to come later;
    None leaves that to the server. `cache_pin_seconds`: how long the prompt's KV stays cached at least. `namespace`:
    requests of different namespaces share no cached prefix. `tenant`: whose fair share the request uses.
    `return_prompt`: the stream's `prompt` is wanted.
    `ipc.validation` holds the bounds.
    """

    external_id: str
    priority: int
    ttft_target_ms: float | None
    cache_pin_seconds: float
    namespace: str
    tenant: str
    return_prompt: bool


class RequestFailed(Exception):
    """A request that ended by an error; `failed` has what the HTTP error object would have."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


def _unavailable(request_id: int, message: str) -> Failed:
    return Failed(request_id, 503, message, "server_error", code="engine_unavailable", retry_after=1.0)


class Stream:
    """The answer to one request. Iterate over it: each item is a non-empty list of what arrived together.

    It ends when every choice has `Finished`, or raises `RequestFailed`. `deliver` does the same with a callback.
    """

    def __init__(self, request_id: int, choices: int, on_abort: Callable[["Stream"], None]) -> None:
        self.request_id = request_id
        self.prompt: PromptInfo | None = None  # before the first item, of a request that asked for it
        self._open_choices = choices
        self._on_abort = on_abort
        self._items: list[Delta | Finished] = []
        self._failed: Failed | None = None
        self._aborted = False
        self._take: Callable[[list[Delta | Finished]], None] | None = None  # of `deliver`
        self._waiter: asyncio.Future[None] | None = None  # of whoever iterates; an Event costs more for each token

    @property
    def done(self) -> bool:
        """True when nothing more will arrive."""
        return self._aborted or self._failed is not None or self._open_choices == 0

    def abort(self) -> None:
        """Stop the generation; whoever iterates gets no further item. Does nothing to a stream that has ended.

        A callback is not called any more in either case: the last items may have arrived and not been handed on.
        """
        self._take = None
        if not self.done:
            self._aborted = True
            self._items.clear()
            self._wake()
            self._on_abort(self)

    async def deliver(self, take: Callable[[list[Delta | Finished]], None]) -> None:
        """Call `take` with each list that iterating would yield, and end as that does or by what `take` raises.

        `take` is called from the callback in which the items arrive, which saves waking a task for each token.
        """
        self._take = take
        self._waiter = asyncio.get_running_loop().create_future()
        self._hand_on()
        try:
            await self._waiter
        finally:
            self._take = None
        if self._failed is not None:
            raise RequestFailed(self._failed)

    def _put(self, item: Delta | Finished | Failed | PromptInfo) -> None:
        """Keep what arrives; `_hand_on` is to be called when there is nothing more of this moment."""
        if isinstance(item, Delta):
            self._items.append(item)
        elif isinstance(item, PromptInfo):
            self.prompt = item
        elif isinstance(item, Failed):
            self._failed = item
        else:
            self._items.append(item)
            self._open_choices -= 1

    def _hand_on(self) -> None:
        """Hand on what has been put: to `deliver`'s callback, or to whoever iterates."""
        if self._take is not None:
            if self._items:
                items, self._items = self._items, []
                try:
                    self._take(items)
                except Exception as error:
                    self._take = None
                    if self._waiter is not None and not self._waiter.done():
                        self._waiter.set_exception(error)
            if not self.done:
                return
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[list[Delta | Finished]]:
        while True:
            if not self._items and not self.done:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self._aborted:
                return
            if self._items:
                items, self._items = self._items, []
                yield items
            elif self._failed is not None:
                raise RequestFailed(self._failed)
            elif self.done:
                return


class _Link:
    """One connection to one tokenizer process, and the requests that go over it."""

    def __init__(self, endpoint: str, on_change: Callable[[], None]) -> None:
        self.model: ModelInfo | None = None
        self.streams: dict[int, Stream] = {}
        self.questions: dict[int, asyncio.Future[Tokenized | Detokenized]] = {}
        self._arrived: dict[int, Stream] = {}  # got something that has not been handed on
        self._on_change = on_change
        decoder: Decoder[ToClient] = Decoder(ToClient)
        identity = b"client-" + os.urandom(8)
        self.dealer = AsyncDealer(endpoint, decoder, identity, self._on_message, self._on_connected, self._on_lost)
        self.dealer.start()

    def _on_connected(self) -> None:
        self.dealer.send(Hello(f"pid {os.getpid()}"))

    def _on_lost(self) -> None:
        self.model = None
        self.fail_all("the connection to the engine was lost")
        self._on_change()

    def _on_message(self, message: ToClient) -> None:
        if isinstance(message, Welcome):
            self.model = message.model
            self._on_change()
            return
        if not isinstance(message, Outputs):
            question = self.questions.get(message.request_id)
            if question is not None and not question.done():
                question.set_result(message)
            return
        self._hand_on_soon()
        for item in message.items:
            stream = self.streams.get(item.request_id)
            if stream is not None:
                stream._put(item)
                self._arrived[item.request_id] = stream
                if not isinstance(item, Delta) and stream.done:
                    del self.streams[item.request_id]
            elif isinstance(item, Failed):
                question = self.questions.get(item.request_id)
                if question is not None and not question.done():
                    question.set_exception(RequestFailed(item))
            # else it was aborted here while its outputs were on their way

    def _hand_on_soon(self) -> None:
        # After all messages that wait: behind a burst, what a stream got in several of them is handed on at once.
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        for request_id in tuple(itertools.islice(self._arrived, _AT_ONCE)):
            self._arrived.pop(request_id)._hand_on()
        if self._arrived:
            # What these have sent leaves first, and whoever else waits for the loop has a turn.
            asyncio.get_running_loop().call_soon(self._hand_on)

    def fail_all(self, reason: str) -> None:
        streams, self.streams = self.streams, {}
        self._hand_on_soon()
        self._arrived.update(streams)
        for stream in streams.values():
            stream._put(_unavailable(stream.request_id, reason))
        for request_id, question in self.questions.items():
            if not question.done():
                question.set_exception(RequestFailed(_unavailable(request_id, reason)))


class AsyncClient:
    """Many requests over one connection to each tokenizer process. All methods belong to the loop that called
    `connect`."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        if not endpoints:
            raise ValueError("endpoints: at least one address is needed")
        self._endpoints = tuple(endpoints)
        self._links: list[_Link] = []
        self._ids = itertools.count(1)
        self._changed = asyncio.Event()

    async def connect(self, timeout: float | None = None) -> ModelInfo:
        """Connect and wait until an engine is ready; TimeoutError after `timeout` seconds."""
        if not self._links:
            self._links = [_Link(endpoint, self._changed.set) for endpoint in self._endpoints]
        async with asyncio.timeout(timeout):
            while (model := self.model) is None:
                self._changed.clear()
                await self._changed.wait()
        return model

    @property
    def model(self) -> ModelInfo | None:
        """What is served; None before an engine is ready and after it was lost."""
        return next((link.model for link in self._links if link.model is not None), None)

    @property
    def live_requests(self) -> int:
        return sum(len(link.streams) for link in self._links)

    def generate(self, prompt: Prompt, params: SamplingParams, **options: Unpack[RequestOptions]) -> Stream:
        """Send a request; the stream fails at once when no engine is there or a number is out of bounds.

        The prompt is checked by the engine, whose answer to a bad one has the same form.
        """
        return self._send(prompt, params, None, options)

    async def embed(self, prompt: Prompt, pooling: Pooling = "", **options: Unpack[RequestOptions]) -> Finished:
        """Ask for an embedding: its `embedding` is float32, of length 1. Raises `RequestFailed`.

        `pooling`: "last", "mean" or "cls"; empty: what the server found right for its model.
        """
        stream = self._send(prompt, EMBEDDING_PARAMS, pooling, options)
        try:
            async for items in stream:
                for item in items:
                    if isinstance(item, Finished):
                        return item
        finally:
            stream.abort()
        raise asyncio.CancelledError  # aborted by somebody else

    def _send(self, prompt: Prompt, params: SamplingParams, pooling: Pooling | None, options: RequestOptions) -> Stream:
        """`pooling`: None for a generation, else see `embed`."""
        ready = [link for link in self._links if link.model is not None]
        request_id = next(self._ids)
        stream = Stream(request_id, params.n, self._abort)
        if not ready:
            stream._put(_unavailable(request_id, "the engine is not ready"))
            return stream
        link = min(ready, key=lambda link: len(link.streams))
        assert link.model is not None
        try:
            # Also of values whose type is wrong: the engine would take the whole connection for broken.
            validate_params(params, link.model)
            validate_options(**options)
            if pooling is not None:
                pooling = pooling or link.model.pooling
                check_pooling(pooling, params)
        except InvalidRequest as error:
            stream._put(Failed(request_id, 400, error.message, "invalid_request_error", error.param, error.code))
            return stream
        if not link.dealer.send(Generate(request_id, prompt, params, pooling=pooling or "", **options)):
            stream._put(_unavailable(request_id, "the engine takes no more requests"))
            return stream
        link.streams[request_id] = stream
        return stream

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, *, add_special_tokens: bool = True, return_token_strs: bool = False
    ) -> Tokenized:
        """Token ids of a prompt, which may be longer than the context. Raises `RequestFailed`.

        `add_special_tokens`: such as a begin-of-sequence token; chat templates write theirs themselves.
        """
        return await self._ask(Tokenize(next(self._ids), prompt, add_special_tokens, return_token_strs), Tokenized)

    async def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of token ids, special tokens written out. Raises `RequestFailed`."""
        request_id = next(self._ids)
        try:
            message = Detokenize(request_id, pack_ints(token_ids))
        except OverflowError:
            reason = "tokens: a token id does not fit 32 bits"
            raise RequestFailed(Failed(request_id, 400, reason, "invalid_request_error", "tokens")) from None
        return (await self._ask(message, Detokenized)).text

    async def _ask(self, message: Tokenize | Detokenize, kind: type[A]) -> A:
        link = next((link for link in self._links if link.model is not None), None)
        if link is None or not link.dealer.send(message):
            raise RequestFailed(_unavailable(message.request_id, "the engine is not ready"))
        question = link.questions[message.request_id] = asyncio.get_running_loop().create_future()
        try:
            answer = await question
        finally:
            del link.questions[message.request_id]
        assert isinstance(answer, kind), "the engine answered another question"
        return answer

    def _abort(self, stream: Stream) -> None:
        for link in self._links:
            if link.streams.pop(stream.request_id, None) is not None:
                link.dealer.send(Abort(stream.request_id))

    def fail_all(self, reason: str) -> None:
        """End every live request with an error that says `reason`, and take no new one."""
        for link in self._links:
            link.model = None
            link.fail_all(reason)

    async def close(self) -> None:
        """Abort what runs and disconnect."""
        for link in self._links:
            for stream in list(link.streams.values()):
                stream.abort()
        await asyncio.sleep(0)
        for link in self._links:
            link.dealer.close()
        self._links = []


class Client:
    """The blocking client: an `AsyncClient` on a thread of its own; usable from several threads."""

    def __init__(self, endpoints: Sequence[str], timeout: float | None = 60.0) -> None:
        """Connect and wait until an engine is ready; TimeoutError after `timeout` seconds."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokenmill-client", daemon=True)
        self._thread.start()
        self._client = AsyncClient(endpoints)
        try:
            self.model = self._call(self._client.connect(timeout))
        except BaseException:
            self.close()
            raise

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stream(
        self, prompt: Prompt, params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> Iterator[list[Delta | Finished]]:
        """Send a request and iterate over what arrives; leaving the loop early aborts it. Raises `RequestFailed`."""

        async def start() -> tuple[Stream, AsyncIterator[list[Delta | Finished]]]:
            stream = self._client.generate(prompt, params, **options)
            return stream, stream.__aiter__()

        async def following(items: AsyncIterator[list[Delta | Finished]]) -> list[Delta | Finished] | None:
            return await anext(items, None)

        stream, items = self._call(start())
        try:
            while (item := self._call(following(items))) is not None:
                yield item
        finally:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(stream.abort)

    def generate(
        self, prompt: Prompt, params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> list[tuple[str, Finished]]:
        """Send a request and wait for all its choices: text and end of each, in order of index."""
        texts: dict[int, list[str]] = {}
        ends: dict[int, Finished] = {}
        for items in self.stream(prompt, params, **options):
            for item in items:
                if isinstance(item, Finished):
                    ends[item.index] = item
                else:
                    texts.setdefault(item.index, []).append(item.text)
        return [("".join(texts.get(index, ())), ends[index]) for index in sorted(ends)]

    def score(self, prompt: Prompt, top: int = 0) -> PromptInfo:
        """What the model makes of a prompt: log-probabilities of its tokens, and of the `top` best at each place.

        Raises `RequestFailed`.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=top)

        async def run() -> PromptInfo:
            stream = self._client.generate(prompt, params)
            async for _ in stream:
                pass
            assert stream.prompt is not None, "the engine ended the request without an answer"
            return stream.prompt

        return self._call(run())

    def tokenize(
        self, prompt: TextPrompt | ChatPrompt, *, add_special_tokens: bool = True, return_token_strs: bool = False
    ) -> Tokenized:
        """See `AsyncClient.tokenize`."""
        return self._call(
            self._client.tokenize(prompt, add_special_tokens=add_special_tokens, return_token_strs=return_token_strs)
        )

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """See `AsyncClient.detokenize`."""
        return self._call(self._client.detokenize(token_ids))

    def embed(self, prompt: Prompt, pooling: Pooling = "", **options: Unpack[RequestOptions]) -> Finished:
        """Ask for an embedding and wait for it: see `AsyncClient.embed`."""
        return self._call(self._client.embed(prompt, pooling, **options))

    def close(self) -> None:
        """Abort what runs and disconnect."""
        if self._thread.is_alive():
            self._call(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
