"""The engine over ZeroMQ as its own HTTP frontend and tools use it: messages, and nothing between them and the caller.

Services use `client`, which adds deadlines, retries and results that are easier to read.
"""

import asyncio
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict, TypeVar, Unpack

from .channels import AsyncDealer
from .codec import Decoder, pack_ints
from .curve import ClientKeys
from .errors import (
    Conflict,
    ConnectionLost,
    RequestFailed,
    authentication_failed,
    bad_request,
    cancelled,
    connection_lost,
    error_of,
    unavailable,
)
from .messages import (
    Abort,
    ChatPrompt,
    ClientReport,
    Delta,
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    Generate,
    Hello,
    ModelInfo,
    Outputs,
    Paused,
    Pooling,
    SamplingParams,
    TextPrompt,
    ToClient,
    Tokenize,
    Tokenized,
    TokenPrompt,
    Welcome,
)
from .stream import Stream
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
    `return_prompt`: the stream's `prompt` is wanted. `deadline`: seconds after which the server ends the request.
    `idempotency_key`: the same key again, with the same request, is answered by the first one's answer.
    `ipc.validation` holds the bounds.
    """

    external_id: str
    priority: int
    ttft_target_ms: float | None
    cache_pin_seconds: float
    namespace: str
    tenant: str
    return_prompt: bool
    deadline: float | None
    idempotency_key: str


class _Link:
    """One connection to one tokenizer process, and the requests that go over it."""

    def __init__(self, endpoint: str, keys: ClientKeys | None, on_change: Callable[[], None]) -> None:
        self.model: ModelInfo | None = None
        self.taking = False  # requests; else the engine behind would refuse them now
        self.refusal: RequestFailed | None = None  # why nothing can be had of the server behind
        self.streams: dict[int, Stream] = {}
        self.questions: dict[int, asyncio.Future[Tokenized | Detokenized]] = {}
        self._arrived: dict[int, Stream] = {}  # got something that has not been handed on
        self._on_change = on_change
        decoder: Decoder[ToClient] = Decoder(ToClient)
        remote = endpoint.startswith("tcp:")
        self.dealer = AsyncDealer(
            endpoint,
            decoder,
            b"" if remote else b"client-" + os.urandom(8),
            self._on_message,
            self._on_connected,
            self._on_lost,
            remote=remote,
            keys=keys,
            on_refused=lambda reason: self._refuse(authentication_failed(reason)),
            on_unreadable=lambda reason: self._refuse(unavailable(0, reason)),
        )
        self.dealer.start()

    def _refuse(self, refusal: RequestFailed) -> None:
        self.refusal = refusal
        self._on_change()

    def _on_connected(self) -> None:
        self.refusal = None
        self.dealer.send(Hello(f"pid {os.getpid()}"))

    def _on_lost(self) -> None:
        self.model = None
        self.taking = False
        self.fail_all("the connection to the engine was lost", connection_lost)
        self._on_change()

    def _on_message(self, message: ToClient) -> None:
        if not isinstance(message, Outputs):
            self._on_rare_message(message)
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
                    question.set_exception(error_of(item))
            # else it was aborted here while its outputs were on their way

    def _on_rare_message(self, message: Welcome | Paused | Tokenized | Detokenized) -> None:
        if isinstance(message, Welcome):
            self.model = message.model
            self.taking = True
            self._on_change()
        elif isinstance(message, Paused):
            self.taking = False
        else:
            question = self.questions.get(message.request_id)
            if question is not None and not question.done():
                question.set_result(message)

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

    def fail_all(self, reason: str, error: Callable[[int, str], RequestFailed] = unavailable) -> None:
        streams, self.streams = self.streams, {}
        self._hand_on_soon()
        self._arrived.update(streams)
        for stream in streams.values():
            stream._fail(error(stream.request_id, reason))
        self.fail_questions(lambda request_id: error(request_id, reason))

    def fail_questions(self, error: Callable[[int], RequestFailed]) -> None:
        for request_id, question in self.questions.items():
            if not question.done():
                question.set_exception(error(request_id))


class Route:
    """Which of a client's links the attempts of one call take.

    Idempotency keys are known to the one tokenizer process behind a link. So with the caller's own `key` it is always
    the same link, which the key alone decides: also of another client, in another process. Else it is the one with the
    least to do, and for the next attempt that link only while the process behind it may know of the request and takes
    requests: when it is away, another one answers sooner, and the caller gets one answer in any case.
    """

    __slots__ = ("key", "last", "stays")

    def __init__(self, key: object = "") -> None:
        self.key = key if isinstance(key, str) else ""  # of another type: refused where the request is sent
        self.last: _Link | None = None  # that an attempt took
        self.stays = False

    def failed(self, error: RequestFailed) -> None:
        """What the last attempt ended with. A refused request is unknown where it was refused."""
        self.stays = isinstance(error, ConnectionLost | Conflict)


class EngineClient:
    """Many requests over one connection to each tokenizer process. All methods belong to the loop that called
    `connect`."""

    def __init__(self, endpoints: Sequence[str], keys: ClientKeys | None = None) -> None:
        if not endpoints:
            raise ValueError("endpoints: at least one address is needed")
        self._endpoints = tuple(endpoints)
        self._keys = keys
        self._closed = False
        self._links: list[_Link] = []
        self._ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # that the links are on
        self._process = os.getpid()

    def check_place(self) -> None:
        """RuntimeError where the links are not: nothing would ever arrive there."""
        if self._process != os.getpid():
            raise RuntimeError("this client was made in another process: after a fork, each process needs its own")
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise RuntimeError("this client belongs to another event loop: each loop needs its own")

    async def connect(self, timeout: float | None = None) -> ModelInfo:
        """Connect and wait until an engine takes requests; TimeoutError after `timeout` seconds.

        `AuthenticationFailed` once no server lets this client in, `Unavailable` once nobody can be understood,
        `Cancelled` when it is closed meanwhile.
        """
        return await self.wait_for(Route(), timeout)

    @property
    def is_new(self) -> bool:
        """Whether it has never been told to connect."""
        return not self._links and not self._closed

    async def wait_for(self, route: Route, timeout: float | None = None) -> ModelInfo:
        """As `connect`: until a link takes requests that the next attempt of a call may take."""
        self.check_place()
        if self.is_new:
            self._loop = asyncio.get_running_loop()
            self._links = [_Link(endpoint, self._keys, self._changed.set) for endpoint in self._endpoints]
        async with asyncio.timeout(timeout):
            while (model := next((link.model for link in self._links_of(route) if link.taking), None)) is None:
                if self._closed:
                    raise cancelled(0)
                refusals = [link.refusal for link in self._links_of(route)]
                if refusals[0] is not None and None not in refusals:
                    raise refusals[0]
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

    def report(self, report: ClientReport) -> None:
        """Tell one of the engine's processes how this one does; lost where there is no connection."""
        if self._links:
            self._links[0].dealer.send(report)

    def generate(
        self, prompt: Prompt, params: SamplingParams, *, route: Route | None = None, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Send a request; the stream fails at once when no engine is there or a number is out of bounds.

        The prompt is checked by the engine, whose answer to a bad one has the same form. `route`: of the call whose
        attempt this is; None: the request is a call of its own, and its idempotency key the caller's.
        """
        return self._send(prompt, params, None, route, options)

    async def embed(self, prompt: Prompt, pooling: Pooling = "", **options: Unpack[RequestOptions]) -> Finished:
        """Ask for an embedding: its `embedding` is float32, of length 1. Raises `RequestFailed`.

        `pooling`: "last", "mean" or "cls"; empty: what the server found right for its model.
        """
        stream = self.start_embedding(prompt, pooling, **options)
        try:
            async for items in stream:
                for item in items:
                    if isinstance(item, Finished):
                        return item
        finally:
            stream.abort()
        raise cancelled(stream.request_id)

    def start_embedding(
        self, prompt: Prompt, pooling: Pooling, *, route: Route | None = None, **options: Unpack[RequestOptions]
    ) -> Stream:
        """The stream behind `embed`; its one item is the answer. `route`: see `generate`."""
        return self._send(prompt, EMBEDDING_PARAMS, pooling, route, options)

    def _send(
        self,
        prompt: Prompt,
        params: SamplingParams,
        pooling: Pooling | None,
        route: Route | None,
        options: RequestOptions,
    ) -> Stream:
        """`pooling`: None for a generation, else see `embed`."""
        self.check_place()
        request_id = next(self._ids)
        stream = Stream(request_id, params.n, self._abort)
        route = Route(options.get("idempotency_key", "")) if route is None else route
        link = self._link_for(route)
        if link is None or link.model is None:
            bound = route.key and self.model is not None
            reason = "the process that knows the idempotency key is not ready" if bound else "the engine is not ready"
            stream._fail(unavailable(request_id, reason))
            return stream
        route.last = link
        try:
            # Also of values whose type is wrong: the engine would take the whole connection for broken.
            validate_params(params, link.model)
            validate_options(**options)
            if pooling is not None:
                pooling = pooling or link.model.pooling
                check_pooling(pooling, params)
        except InvalidRequest as error:
            stream._fail(bad_request(request_id, error.message, error.param, error.code))
            return stream
        if not link.dealer.send(Generate(request_id, prompt, params, pooling=pooling or "", **options)):
            stream._fail(unavailable(request_id, "the engine takes no more requests"))
            return stream
        stream.sent = True
        link.streams[request_id] = stream
        return stream

    def _links_of(self, route: Route) -> Sequence[_Link]:
        """Those that a call's attempts may take at all."""
        if not route.key or not self._links:
            return self._links
        return (self._links[zlib.crc32(route.key.encode(errors="replace")) % len(self._links)],)

    def _link_for(self, route: Route) -> _Link | None:
        """Who gets the next attempt; None: nobody is there."""
        ready = [link for link in self._links_of(route) if link.model is not None]
        if route.stays and route.last in ready and route.last.taking:
            return route.last
        # Where it was refused it comes last: the others may have room.
        return min(ready, key=lambda link: (not link.taking, link is route.last, len(link.streams)), default=None)

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
            raise bad_request(request_id, "tokens: a token id does not fit 32 bits", "tokens") from None
        return (await self._ask(message, Detokenized)).text

    async def _ask(self, message: Tokenize | Detokenize, kind: type[A]) -> A:
        self.check_place()
        link = next((link for link in self._links if link.model is not None), None)
        if link is None or not link.dealer.send(message):
            raise unavailable(message.request_id, "the engine is not ready")
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
            link.taking = False
            link.fail_all(reason)

    async def close(self) -> None:
        """Abort what runs and disconnect. Does nothing in a forked process, where the connection is its parent's."""
        if self._process != os.getpid():
            return
        for link in self._links:
            for stream in list(link.streams.values()):
                stream.abort()
            link.fail_questions(cancelled)
        self._closed = True
        self._changed.set()
        await asyncio.sleep(0)
        for link in self._links:
            link.dealer.close()
        self._links = []
