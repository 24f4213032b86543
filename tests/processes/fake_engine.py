"""A tokenizer process with a script in place of a model, behind the real socket, for tests of its clients.

What it answers depends on the last line of the prompt:

- `hang`: one token, then nothing until the client aborts
- `mute`: nothing at all, until the test says how to go on
- `refuse`: a 429 before anything else, because the queue is full
- `late`: likewise, because the first token would come too late
- `fail`: one token, then a 503
- `flood`: text as fast as it can, until the client aborts
- `gush`: half a megabyte of text at once, then like any other
- `clog`: half a megabyte of text at once, then nothing until the client aborts
- `slow`: one token every 50 ms
- `loop`: two tokens, and an end because the output repeats itself
- `say "..."`: the text of this JSON string, three characters a token, up to `max_tokens`, and an end
- anything else: `max_tokens` tokens (at most 8: then it "stops"), one message for each
"""

import asyncio
import json
import struct
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ipc.channels import AsyncRouter
from ipc.codec import Decoder, pack_floats, pack_ints, unpack_ints
from ipc.messages import (
    Abort,
    ChatPrompt,
    ChoiceTimings,
    ClientReport,
    Delta,
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Hello,
    Message,
    ModelInfo,
    Outputs,
    PositionLogprobs,
    PromptInfo,
    PromptPosition,
    TextPrompt,
    Timings,
    Tokenize,
    Tokenized,
    TokenLogprob,
    ToTokenizer,
    Welcome,
)
from ipc.stats_channel import StatsPublisher
from ipc.stats_messages import Cause, DiagnosedMetric, Diagnosis, EngineDetails, Stats

MODEL = ModelInfo(
    names=("tiny", "org/tiny"),
    max_model_len=256,
    vocab_size=1000,
    created=1_700_000_000,
    has_chat_template=True,
    pooling="mean",
)
MOST_TOKENS = 8
CACHED = 3
GUSH = 1 << 19  # characters
REFUSALS = {"refuse": ("queue_full", 2.5), "late": ("ttft_target", 0.25)}  # code and seconds


def prompt_length(request: Generate) -> int:
    """Tokens of the prompt, as the fake counts them: one for each character of a text."""
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt):
        return sum(len(message.content) for message in prompt.messages)
    return len(prompt.text) if isinstance(prompt, TextPrompt) else len(unpack_ints(prompt.token_ids))


def tokenized(request: Tokenize) -> Tokenized:
    """A token for each character, its code; a chat's messages are written one a line, each behind its role."""
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt):
        text = "".join(f"{message.role}: {message.content}\n" for message in prompt.messages)
        text += "assistant:" if prompt.add_generation_prompt else ""
    else:
        text = prompt.text
    text = ("^" if request.add_special_tokens else "") + text
    spelled = tuple(text) if request.return_token_strs else ()
    return Tokenized(request.request_id, pack_ints(map(ord, text)), spelled)


def prompt_info(request: Generate) -> PromptInfo:
    """Every token of a prompt is "p" and its number; it has a log-probability of minus that, and that as its rank."""
    count = prompt_length(request)
    prompt = request.prompt
    text = prompt.text if isinstance(prompt, TextPrompt) else "".join(f"p{at}" for at in range(count))
    asked = request.params.prompt_logprobs
    positions = [
        PromptPosition(
            TokenLogprob(500 + at, f"p{at}", f"p{at}".encode(), -float(at)),
            at,
            tuple(TokenLogprob(600 + rank, f"t{rank}", b"t", -rank / 8) for rank in range(asked or 0)),
        )
        for at in range(1, count if asked is not None else 0)
    ]
    ids = pack_ints(500 + at for at in range(count))
    return PromptInfo(request.request_id, ids, text, pack_ints(range(count)), "p0", tuple(positions))


def last_line(request: Generate) -> str:
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt):
        return prompt.messages[-1].content.splitlines()[-1:][0] if prompt.messages[-1].content else ""
    return prompt.text.splitlines()[-1] if isinstance(prompt, TextPrompt) else ""


def word(choice: int, position: int) -> str:
    """Text of one token."""
    return f" é{choice}.{position}"


def expected_text(choice: int, tokens: int) -> str:
    return "".join(word(choice, position) for position in range(tokens))


EMBEDDING = (0.6, -0.8)  # of every prompt
CHUNKS = (2, 3)  # tokens that are computed of every prompt, whatever its length


def timings(received: float, choice: int, tokens: int) -> Timings:
    """Eight moments of what passed between then and now, in equal distances; `choice` is the number of preemptions."""
    now = time.monotonic()
    moments = [received + (now - received) * at / 7 for at in range(8)]
    return Timings(
        time.time() - now,
        moments[0],
        moments[1],
        moments[7],
        ChoiceTimings(
            moments[2],
            moments[3],
            moments[5],
            moments[6],
            len(CHUNKS) + tokens - 1,
            choice,
            struct.pack("<2d", moments[3], moments[3]),
            struct.pack("<2d", moments[4], moments[5]),
            pack_ints(CHUNKS),
        ),
    )


DIAGNOSIS = Diagnosis(
    time=1000.0,
    seconds=30.0,
    arrived=5,
    finished=4,
    measures=(
        ("running", 2.0),
        ("waiting", 3.5),
        ("device_busy", 0.75),
        ("kv_usage", 0.5),
        ("output_tokens_p50", 10.0),
        ("output_tokens_p90", 20.0),
        ("output_tokens_max", 30.0),
        ("length_finishes", 0.25),
    ),
    metrics=(
        DiagnosedMetric(
            "ttft",
            1.25,
            (("queue: max_seqs", 1.0), ("its own prompt", 0.25)),
            (Cause("queue", "3.5 waited", "--max-seqs", "2", "8", 0.3, 0.8, (("throughput", 12.5),)),),
        ),
        DiagnosedMetric("throughput", 10.0, (("device busy", 0.75),), (Cause("device", "busy", predicted=10.0),)),
    ),
    summary="ttft is bound by queue",
)


class FakeEngine:
    """Runs on a thread of its own. `requests`, `aborted` and `reports` say what arrived."""

    def __init__(self, directory: Path, *, welcome: bool = True, model: ModelInfo = MODEL) -> None:
        self.endpoint = f"ipc://{directory}/clients-0"
        self.stats_endpoint = f"ipc://{directory}/stats"
        self.requests: list[Generate] = []
        self.aborted: set[int] = set()
        self.reports: list[ClientReport] = []
        self._welcome = welcome
        self._model = model
        self._peers: list[bytes] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asked_by: dict[int, bytes] = {}
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._call(self._start())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        decoder: Decoder[Any] = Decoder(ToTokenizer)
        self._router = AsyncRouter(self.endpoint, decoder, 1, self._on_message, lambda peer: None)
        self._router.start()
        self._publisher = StatsPublisher(self.stats_endpoint)
        self._diagnosing = self._loop.create_task(self._diagnose())

    async def _diagnose(self) -> None:
        while True:
            if self._publisher.diagnosis_wanted:
                self._publisher.send_diagnosis(DIAGNOSIS)
            await asyncio.sleep(0.05)

    def _on_message(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._peers.append(peer)
            if self._welcome:
                self._router.send(peer, Welcome(self._model))
        elif isinstance(message, Abort):
            task = self._tasks.pop(message.request_id, None)
            if task is not None:
                task.cancel()
            with self._changed:
                self.aborted.add(message.request_id)
                self._changed.notify_all()
        elif isinstance(message, ClientReport):
            self.reports.append(message)
        elif isinstance(message, Tokenize):
            self._router.send(peer, tokenized(message))
        elif isinstance(message, Detokenize):
            text = "".join(map(chr, unpack_ints(message.token_ids)))
            self._router.send(peer, Detokenized(message.request_id, text))
        elif isinstance(message, Generate):
            with self._changed:
                self.requests.append(message)
                self._changed.notify_all()
            self._asked_by[message.request_id] = peer
            self._begin(message, last_line(message))

    def _begin(self, request: Generate, kind: str) -> None:
        peer = self._asked_by[request.request_id]
        self._tasks[request.request_id] = self._loop.create_task(self._answer(peer, request, kind))

    def go_on(self, request: Generate, kind: str) -> None:
        """Answer a mute request after all, as if `kind` had been the last line of its prompt."""
        self._loop.call_soon_threadsafe(self._begin, request, kind)

    async def _answer(self, peer: bytes, request: Generate, kind: str) -> None:
        name = request.request_id
        received = time.monotonic()
        if kind == "mute":
            return
        if request.pooling:
            ended = Finished(name, 0, "length", None, prompt_length(request), 0, CACHED, pack_floats(EMBEDDING))
            self._send(peer, ended)
            return
        if kind in REFUSALS:
            code, retry_after = REFUSALS[kind]
            self._send(peer, Failed(name, 429, "refused", "rate_limit_error", code=code, retry_after=retry_after))
            return
        if kind in ("hang", "fail"):
            self._send(peer, Delta(name, 0, "begun", pack_ints([1])))
            if kind == "fail":
                await asyncio.sleep(0.05)
                self._send(peer, Failed(name, 503, "the engine died", "server_error"))
            return
        while kind == "flood":
            self._send(peer, Delta(name, 0, "x" * 65536, pack_ints([1])))
            await asyncio.sleep(0.001)
        if request.return_prompt or request.params.prompt_logprobs is not None:
            self._send(peer, prompt_info(request))
        if kind in ("gush", "clog"):
            self._send(peer, Delta(name, 0, "x" * GUSH, pack_ints([1])))
            if kind == "clog":
                return
        if kind.startswith("say "):
            await self._say(peer, request, json.loads(kind.removeprefix("say ")))
            return
        asked = MOST_TOKENS if request.params.max_tokens is None else request.params.max_tokens
        reason: FinishReason = "length" if asked <= MOST_TOKENS else "stop"
        count = min(asked, MOST_TOKENS)
        stop_reason = None
        if kind == "loop":
            count, reason, stop_reason = 2, "stop", "repetition_loop"
        for position in range(count):
            if kind == "slow":
                await asyncio.sleep(0.05)
            choices = range(request.params.n)
            self._send(peer, *[self._delta(request, choice, position) for choice in choices])
            await asyncio.sleep(0)
        self._send(
            peer,
            *[
                Finished(
                    name,
                    choice,
                    reason,
                    stop_reason,
                    prompt_length(request),
                    count,
                    CACHED + choice,
                    timings=timings(received, choice, count),
                )
                for choice in range(request.params.n)
            ],
        )

    async def _say(self, peer: bytes, request: Generate, text: str) -> None:
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        reason: FinishReason = "stop"
        if request.params.max_tokens is not None and request.params.max_tokens < len(pieces):
            pieces, reason = pieces[: request.params.max_tokens], "length"
        choices = range(request.params.n)
        for position, piece in enumerate(pieces):
            chosen = TokenLogprob(position, piece, piece.encode(), -0.5)
            logprobs = () if request.params.logprobs is None else (PositionLogprobs(chosen, ()),)
            deltas = [Delta(request.request_id, choice, piece, pack_ints([position]), logprobs) for choice in choices]
            self._send(peer, *deltas)
            await asyncio.sleep(0)
        count = prompt_length(request), len(pieces), CACHED
        self._send(peer, *[Finished(request.request_id, choice, reason, None, *count) for choice in choices])

    def _delta(self, request: Generate, choice: int, position: int) -> Delta:
        text = word(choice, position)
        logprobs: tuple[PositionLogprobs, ...] = ()
        if request.params.logprobs is not None:
            chosen = TokenLogprob(position, text, text.encode(), -0.5)
            others = [
                TokenLogprob(100 + rank, f"other{rank}", f"other{rank}".encode(), float("-inf"))
                for rank in range(request.params.logprobs)
            ]
            logprobs = (PositionLogprobs(chosen, tuple(others), position * len(text)),)
        return Delta(request.request_id, choice, text, pack_ints([position]), logprobs, False, prompt_length(request))

    def _send(self, peer: bytes, *items: Delta | Finished | Failed | PromptInfo) -> None:
        self._router.send(peer, Outputs(items))

    def wait_for_request(self, external_id: str, timeout: float = 10) -> Generate:
        """The request with this id, once it is here."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._find(external_id) is not None, timeout), "no request arrived"
            found = self._find(external_id)
        assert found is not None
        return found

    def _find(self, external_id: str) -> Generate | None:
        return next((request for request in self.requests if request.external_id == external_id), None)

    def wait_for_abort(self, request_id: int, timeout: float = 10) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.aborted, timeout), "no abort arrived"

    def welcome(self) -> None:
        """Tell every client that the engine is ready."""

        async def send() -> None:
            self._welcome = True
            for peer in self._peers:
                self._router.send(peer, Welcome(self._model))

        self._call(send())

    def publish(self, stats: Stats) -> None:
        async def send() -> None:
            self._publisher.send(stats)

        self._call(send())

    def publish_details(self, details: EngineDetails) -> None:
        async def send() -> None:
            self._publisher.send_details(details)

        self._call(send())

    def is_watched(self) -> bool:
        """Whether a console has asked for details."""
        answer: list[bool] = []

        async def ask() -> None:
            answer.append(self._publisher.watched)

        self._call(ask())
        return answer[0]

    def close(self) -> None:
        async def stop() -> None:
            for task in self._tasks.values():
                task.cancel()
            self._router.close()
            self._publisher.close()

        self._call(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
