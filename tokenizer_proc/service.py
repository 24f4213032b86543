"""Requests between clients and the scheduler: who asked for what, and where its outputs go.

No sockets here: messages come in through methods and leave through two callables. Encoding is in
`tokenizer_proc.encoding`, the text of a choice in `tokenizer_proc.choice`. Whatever goes wrong with one request ends
that request, never the process.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from config.markup import REASONING_OPENING
from ipc.codec import unpack_int64s, unpack_ints
from ipc.engine_messages import AbortRequests, PromptScores, RowOutput, StepOutputs, StopRequest, ToScheduler
from ipc.messages import (
    Abort,
    ChatPrompt,
    ClientReport,
    Delta,
    Detokenize,
    Failed,
    Finished,
    Generate,
    Hello,
    ModelInfo,
    Outputs,
    Paused,
    PromptInfo,
    ToClient,
    Tokenize,
    ToTokenizer,
    Welcome,
)
from ipc.sessions import LinkError
from ipc.trace_messages import TracedDetokenizing, TracedEncoding
from ipc.tracing import Tracer
from ipc.validation import InvalidRequest, validate_generate

from .choice import Choice, Preparation, Progress
from .client_reports import ClientReports
from .encoding import PromptEncoder
from .failures import explained, failed
from .grammars import GrammarCompiler
from .idempotency import IdempotencyKeys, Record
from .ingress import Limits, bad_word_ids, prompt_name, submits
from .prompt_report import PromptReport
from .text_service import TextService
from .vocabulary import Vocabulary

log = logging.getLogger(__name__)

_MAX_STALE = 1 << 16  # ended requests whose late outputs are expected; older ones have long been answered

_SHUTTING_DOWN = "the engine is shutting down"
_TAG_TOKENS = 16  # at the end of a prompt: more than a tag and the white space behind it have

_Outgoing = Delta | Finished | Failed | PromptInfo


class _Request:
    """One `Generate`: its live choices by the scheduler's id, and its encoding while that runs."""

    def __init__(self, peer: bytes, message: Generate) -> None:
        self.peer = peer
        self.message = message
        self.received = time.monotonic()
        self.choices: dict[int, Choice] = {}
        self.report: PromptReport | None = None  # until it is complete and sent
        self.held: list[_Outgoing] = []  # outputs of choices that are ahead of it
        self.encoding: asyncio.Task[None] | None = None
        self.record: Record | None = None  # of a request with an idempotency key
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def key(self) -> tuple[bytes, int]:
        return self.peer, self.message.request_id

    def failed(self, status: int, message: str, param: str | None = None, code: str | None = None) -> Failed:
        return failed(self.message.request_id, status, message, param, code)


class _Outbox:
    """What one step gives to send: items by client, and what the scheduler is to be told."""

    def __init__(self) -> None:
        self.items: dict[bytes, list[_Outgoing]] = {}
        self.aborts: list[int] = []
        self.stops: list[StopRequest] = []

    def put(self, request: _Request, item: _Outgoing) -> None:
        if request.report is not None and not isinstance(item, Failed):
            request.held.append(item)
            return
        if request.record is not None and not isinstance(item, Failed):
            request.record.items.append(item)
        self.items.setdefault(request.peer, []).append(item)

    def put_report(self, request: _Request, report: PromptReport) -> None:
        """What is known of the prompt, now that all is, and what waited for it."""
        request.report = None
        held, request.held = request.held, []
        for item in (report.info(), *held):
            self.put(request, item)


def _columns(message: StepOutputs) -> tuple[Sequence[int], Sequence[int]]:
    """Request ids and tokens of the plain rows."""
    try:
        request_ids, token_ids = unpack_int64s(message.plain_ids), unpack_ints(message.plain_tokens)
    except ValueError:
        raise LinkError("step outputs with half an integer in a column") from None
    if len(request_ids) != len(token_ids):
        raise LinkError(f"step outputs with {len(request_ids)} request ids and {len(token_ids)} tokens")
    return request_ids, token_ids


class Service:
    """State of the tokenizer process. All methods belong to one event loop."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: PromptEncoder,
        limits: Limits,
        *,
        max_encoding: int,
        to_client: Callable[[bytes, ToClient], bool],
        to_scheduler: Callable[[ToScheduler], bool],
        on_idle: Callable[[], None],
        grammars: GrammarCompiler | None = None,
        tracer: Tracer | None = None,
        idempotency_seconds: float = 600.0,
    ) -> None:
        """`max_encoding`: prompts that may wait for their encoding. `on_idle` runs when a drain is complete.
        `idempotency_seconds`: how long answers are kept for requests that are sent again.

        Without `grammars`, requests with one are refused.
        """
        self._tracer = tracer or Tracer("", "")
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._limits = limits
        self._clock_offset = time.time() - time.monotonic()
        self._max_encoding = max_encoding
        self._to_client = to_client
        self._texts = TextService(vocabulary, encoder, limits.model, max_encoding, to_client)
        self._to_scheduler = to_scheduler
        self._on_idle = on_idle
        self._grammars = grammars
        self._keys = IdempotencyKeys(idempotency_seconds)
        self._requests: dict[tuple[bytes, int], _Request] = {}
        self._by_id: dict[int, _Request] = {}
        self._ids = itertools.count(1)
        self._stale: dict[int, None] = {}  # in order of their end
        self._encoding = 0
        self._greeted: set[bytes] = set()
        self._unavailable: str | None = "the engine is not ready yet"
        self._draining = False
        self.client_reports = ClientReports()
        self.unknown_outputs = 0  # rows for requests that never existed or ended long ago

    def describe(self, model: ModelInfo) -> None:
        """What clients are told of the model from now on."""
        self._limits = msgspec.structs.replace(self._limits, model=model)

    @property
    def live_requests(self) -> int:
        return len(self._requests)

    @property
    def encoding(self) -> int:
        """Prompts that are being encoded, or wait for it."""
        return self._encoding

    # --- clients ---

    def from_client(self, peer: bytes, message: ToTokenizer) -> None:
        """Handle one message of a client."""
        match message:
            case Generate():
                self._generate(peer, message)
            case Abort(request_id):
                request = self._requests.get((peer, request_id))
                if request is not None:
                    self._cancel([request])
            case Tokenize() | Detokenize():
                self._texts.handle(peer, message)
            case ClientReport():
                self.client_reports.take(peer, message)
            case Hello():
                self._greeted.add(peer)
                if self._unavailable is None and not self._draining:
                    self._welcome(peer)

    def client_lost(self, peer: bytes) -> None:
        """Nobody reads this client's outputs any more: abort its requests."""
        self._greeted.discard(peer)
        self.client_reports.forget(peer)
        self._cancel([request for request in self._requests.values() if request.peer == peer])

    def _welcome(self, peer: bytes) -> None:
        self._to_client(peer, Welcome(self._limits.model))

    def _pause(self, reason: str) -> None:
        """Tell every client that said hello to wait for the next welcome."""
        for peer in list(self._greeted):
            self._to_client(peer, Paused(reason))

    def _generate(self, peer: bytes, message: Generate) -> None:
        request = _Request(peer, message)
        if request.key in self._requests:
            # The first request of this number goes on; its own answer stays apart from this one's in time only.
            self._refuse(request, request.failed(400, "request_id is already in use", "request_id"))
            return
        if self._unavailable is not None or self._draining:
            reason = self._unavailable or _SHUTTING_DOWN
            self._refuse(request, request.failed(503, reason, code="engine_unavailable"))
            return
        self._requests[request.key] = request
        try:
            validate_generate(message, self._limits.model)
            if message.idempotency_key and self._answered_before(request):
                return
            if message.deadline is not None:
                request.deadline = asyncio.get_running_loop().call_later(message.deadline, self._expire, request)
            grammar = self._known_grammar(message)
            token_ids = None if grammar is None else self._encoder.encode_now(message.prompt)
            if grammar is not None and token_ids is not None:
                self._submit(request, token_ids, grammar)
                return
        except Exception as error:
            self._drop(request, error)
            return
        if self._encoding >= self._max_encoding:
            self._end(request)
            self._refuse(request, request.failed(429, "too many prompts are waiting to be encoded", code="queue_full"))
            return
        self._encoding += 1
        request.encoding = asyncio.get_running_loop().create_task(self._encode(request))
        request.encoding.add_done_callback(self._encoded)

    def _answered_before(self, request: _Request) -> bool:
        """Whether the request was a repetition, which has now been given the first one's answer."""
        before = self._keys.begin(request.message)
        if isinstance(before, Record):
            request.record = before
            return False
        self._end(request)
        self._to_client(request.peer, Outputs(before))
        return True

    def _expire(self, request: _Request) -> None:
        """The request's deadline has come, wherever the request is."""
        self._cancel([request])
        reason = f"the deadline of {request.message.deadline:g} s passed before the answer was whole"
        self._refuse(request, request.failed(408, reason, "deadline", "deadline_exceeded"))

    def _known_grammar(self, message: Generate) -> str | None:
        """The request's grammar as the worker takes it, "" for none; None when it has yet to be compiled."""
        grammar = message.params.grammar
        if grammar is None:
            return ""
        if self._grammars is None:
            raise InvalidRequest("grammar is not supported here", "grammar")
        return self._grammars.known(grammar)

    async def _encode(self, request: _Request) -> None:
        try:
            grammar = self._known_grammar(request.message)
            if grammar is None:
                assert self._grammars is not None
                assert request.message.params.grammar is not None
                grammar = await self._grammars.compile(request.message.params.grammar)
            token_ids = await self._encoder.encode(request.message.prompt)
            if self._requests.get(request.key) is request:
                self._submit(request, token_ids, grammar)
        except Exception as error:
            if self._requests.get(request.key) is request:
                self._drop(request, error)

    def _encoded(self, task: asyncio.Task[None]) -> None:
        self._encoding -= 1

    def _submit(self, request: _Request, prompt: Iterable[int], grammar: str) -> None:
        preparation = Preparation(self._clock_offset, request.received, time.monotonic())
        token_ids = list(prompt)
        message = request.message
        if self._tracer.wanted:
            span = (preparation.received, preparation.tokenized)
            self._tracer.add(TracedEncoding(message.external_id, *span, len(token_ids)))
        ids = [next(self._ids) for _ in range(message.params.n)]
        bad_words = bad_word_ids(message.params.bad_words, self._vocabulary)
        to_send = list(submits(ids, token_ids, message, self._limits, bad_words, grammar))
        in_reasoning = self._opens_reasoning(message, token_ids)
        for index, request_id in enumerate(ids):
            choice = Choice(
                message.request_id,
                index,
                token_ids,
                message.params,
                self._vocabulary,
                preparation,
                in_reasoning=in_reasoning,
            )
            request.choices[request_id] = choice
            self._by_id[request_id] = request
        for submit in to_send:
            if not self._to_scheduler(submit):
                self._cancel([request])
                self._refuse(request, request.failed(503, "the engine is not reachable", code="engine_unavailable"))
                return
        if message.return_prompt or message.params.prompt_logprobs is not None:
            report = PromptReport(message, token_ids, self._vocabulary)
            if report.complete:
                outbox = _Outbox()
                outbox.put(request, report.info())
                self._send(outbox.items)
            else:
                request.report = report

    def _opens_reasoning(self, message: Generate, token_ids: Sequence[int]) -> bool:
        """Whether the rendered prompt ends with the tag that begins reasoning."""
        if not self._limits.model.reasoning_format or not isinstance(message.prompt, ChatPrompt):
            return False
        tail = b"".join(self._vocabulary.token_bytes(token_id) for token_id in token_ids[-_TAG_TOKENS:])
        return tail.rstrip().endswith(REASONING_OPENING.encode())

    def _refuse(self, request: _Request, failed: Failed) -> None:
        self._to_client(request.peer, Outputs((failed,)))

    def _drop(self, request: _Request, error: Exception) -> None:
        """End a request that did not get as far as the scheduler, or not wholly."""
        self._cancel([request])
        self._refuse(request, explained(request.message.request_id, error))

    def _cancel(self, requests: Iterable[_Request]) -> None:
        """End requests without a word to their client, and abort what the scheduler has of them."""
        aborted: list[int] = []
        for request in requests:
            aborted += request.choices
            self._end(request)
        if aborted:
            self._to_scheduler(AbortRequests(tuple(aborted)))

    def _end(self, request: _Request) -> None:
        self._requests.pop(request.key, None)
        if request.encoding is not None:
            if request.encoding is not asyncio.current_task():
                request.encoding.cancel()
            request.encoding = None
        if request.deadline is not None:
            request.deadline.cancel()
        if request.record is not None:
            request.record.release()
        for request_id in request.choices:
            self._forget(request_id)
        request.choices = {}
        if self._draining and not self._requests:
            self._on_idle()

    def _forget(self, request_id: int) -> None:
        """A choice that ended here first: rows of it may still be on their way."""
        del self._by_id[request_id]
        self._expect_late_rows(request_id)

    def _expect_late_rows(self, request_id: int) -> None:
        self._stale[request_id] = None
        if len(self._stale) > _MAX_STALE:
            del self._stale[next(iter(self._stale))]

    # --- scheduler ---

    def scheduler_ready(self) -> None:
        """The engine takes requests: tell every client that said hello."""
        self._unavailable = None
        for peer in list(self._greeted):
            self._welcome(peer)

    def scheduler_lost(self) -> None:
        """Every request behind the scheduler is gone; new ones are refused until it is back."""
        self.fail_all("the scheduler is gone")

    def fail_all(self, reason: str) -> None:
        """End every live request with a 503 that says `reason`, and refuse new ones until the scheduler is ready."""
        self._unavailable = reason
        self._pause(reason)
        items: dict[bytes, list[_Outgoing]] = {}
        for request in list(self._requests.values()):
            items.setdefault(request.peer, []).append(request.failed(503, reason, code="engine_unavailable"))
            self._end(request)
        self._send(items)

    def drain(self) -> None:
        """Refuse new requests; `on_idle` runs when the last live one has ended."""
        self._draining = True
        self._pause(_SHUTTING_DOWN)
        if not self._requests:
            self._on_idle()

    def from_scheduler(self, message: StepOutputs) -> None:
        """Turn the rows of one step into one message for each client; `LinkError` when the columns do not match."""
        start = time.monotonic() if self._tracer.wanted else 0.0
        plain_ids, plain_tokens = _columns(message)
        outbox = _Outbox()
        for row in message.rows:
            self._take_row(row, outbox)
        by_id = self._by_id
        for request_id, token_id in zip(plain_ids, plain_tokens, strict=True):
            request = by_id.get(request_id)
            if request is None:
                self._unexpected(request_id, outbox)
                continue
            try:
                progress = request.choices[request_id].take_plain(token_id)
            except Exception as error:
                self._broken(request, error, outbox)
                continue
            if progress.finished is not None:
                self._take_progress(request, request_id, progress, outbox, ended_there=False)
            elif progress.delta is not None:
                outbox.put(request, progress.delta)
        for stop in outbox.stops:
            self._to_scheduler(stop)
        if outbox.aborts:
            self._to_scheduler(AbortRequests(tuple(outbox.aborts)))
        self._send(outbox.items)
        if start:
            tokens = len(plain_ids) + sum(len(row.token_ids) // 4 for row in message.rows if isinstance(row, RowOutput))
            self._tracer.add(TracedDetokenizing(start, time.monotonic(), tokens))

    def _take_row(self, row: RowOutput | Failed, outbox: _Outbox) -> None:
        request = self._by_id.get(row.request_id)
        if request is None:
            self._unexpected(row.request_id, outbox)
            return
        if isinstance(row, Failed):
            self._row_failed(request, row, outbox)
            return
        try:
            if row.prompt_scores is not None:
                self._take_scores(request, row.prompt_scores, outbox)
            progress = request.choices[row.request_id].take(row)
        except Exception as error:
            self._broken(request, error, outbox)
            return
        self._take_progress(request, row.request_id, progress, outbox, ended_there=row.finish is not None)

    @staticmethod
    def _take_scores(request: _Request, scores: PromptScores, outbox: _Outbox) -> None:
        report = request.report
        if report is None:
            raise ValueError("log-probabilities of a prompt that nobody asked for")
        report.take(scores)
        if report.complete:
            outbox.put_report(request, report)

    def _take_progress(
        self, request: _Request, request_id: int, progress: Progress, outbox: _Outbox, *, ended_there: bool
    ) -> None:
        """`ended_there`: the scheduler has ended this choice too, so no further row of it can come."""
        if progress.delta is not None:
            outbox.put(request, progress.delta)
        if progress.finished is not None:
            outbox.put(request, progress.finished)
            del request.choices[request_id]
            del self._by_id[request_id]
            if not ended_there:
                self._expect_late_rows(request_id)
            if not request.choices:
                if request.record is not None:
                    request.record.keep()
                self._end(request)
        if progress.stops_early:
            outbox.stops.append(StopRequest(request_id))

    def _broken(self, request: _Request, error: Exception, outbox: _Outbox) -> None:
        """A row that cannot be used fails its request, and no other."""
        outbox.aborts += request.choices
        outbox.put(request, explained(request.message.request_id, error))
        self._end(request)

    def _row_failed(self, request: _Request, row: Failed, outbox: _Outbox) -> None:
        """One choice's failure is the whole request's."""
        outbox.aborts += [request_id for request_id in request.choices if request_id != row.request_id]
        self._end(request)
        param = prompt_name(request.message) if row.param == "prompt" else row.param
        name = request.message.request_id
        outbox.put(request, Failed(name, row.status, row.message, row.type, param, row.code, row.retry_after))

    def _unexpected(self, request_id: int, outbox: _Outbox) -> None:
        if request_id in self._stale:
            return
        self.unknown_outputs += 1
        log.warning("output for an unknown request (%d so far): it is aborted", self.unknown_outputs)
        outbox.aborts.append(request_id)
        self._expect_late_rows(request_id)

    def _send(self, items: dict[bytes, list[_Outgoing]]) -> None:
        for peer, outgoing in items.items():
            self._to_client(peer, Outputs(tuple(outgoing)))
