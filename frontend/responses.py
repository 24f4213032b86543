"""OpenAI's response objects: whole answers, and the chunks of streamed ones.

Chunks are put together from parts encoded once per request, since a chunk is built for each token.
"""

import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import UNSET

from ipc.codec import unpack_ints
from ipc.messages import Delta, Finished, PositionLogprobs, PromptInfo, TokenLogprob

from .generation import Batch
from .prompt_fields import CompletionLogprobs, echoed_logprobs, finite, prompt_logprobs
from .protocol import (
    AssistantMessage,
    ChatChoice,
    ChatLogprob,
    ChatLogprobs,
    CompletionChoice,
    CompletionResponse,
    TopLogprob,
    Usage,
)
from .rendering import Renderer
from .requests import Job

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class Responder(Renderer):
    """Builds the answer to one request, streamed or whole. Index is the choice's, over all prompts."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    _no_text: bytes  # where a chunk's text would stand, in its last one

    def __init__(self, job: Job, fingerprint: str) -> None:
        self.job = job
        self.id = self.id_prefix + uuid.uuid4().hex
        self.created = int(time.time())
        self._fingerprint = fingerprint
        self.prompt_of: Callable[[int], PromptInfo] = _no_prompt  # by index of a choice that has begun
        self._begun: set[int] = set()
        self._open_choices = len(job.prompts) * job.params.n
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # what a chunk of a choice is but for its text
        head = {
            "id": self.id,
            "object": self.chunk_object_name,
            "created": self.created,
            "model": job.model,
            "system_fingerprint": fingerprint,
        }
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if job.include_usage else b"]}\n\n"

    def chunks(self, batch: Batch) -> bytes:
        """Server-sent events for what arrived together; empty when nothing is to be said yet."""
        if len(batch) == 1:
            # The usual case, one token of one choice, without the bookkeeping below.
            index, item = batch[0]
            if isinstance(item, Delta) and index in self._begun and not item.logprobs and not self.job.return_token_ids:
                return self._text_event(index, item.text) if item.text else b""
        deltas: dict[int, list[Delta]] = {}
        ends: dict[int, Finished] = {}
        for index, item in batch:
            if isinstance(item, Finished):
                ends[index] = item
                deltas.setdefault(index, [])
            else:
                deltas.setdefault(index, []).append(item)
        events: list[bytes] = []
        for index, items in deltas.items():
            if index not in self._begun:
                self._begun.add(index)
                events += [self._event(choice, self._head_members(index)) for choice in self._first_choices(index)]
            text = "".join(item.text for item in items)
            logprobs = [position for item in items for position in item.logprobs]
            token_ids = self._token_ids(items)
            if text or logprobs or token_ids:
                found = self._logprobs(index, logprobs) if logprobs else None
                choice = self._text_choice(index, text, found)
                if token_ids:
                    choice = choice[:-1] + b',"token_ids":' + _encode(token_ids) + b"}"
                events.append(self._event(choice))
            if index in ends:
                events.append(self._last_event(index, ends[index]))
        return b"".join(events)

    def _text_event(self, index: int, text: str) -> bytes:
        """A chunk with more of a choice's text and nothing else, as nearly all are."""
        around = self._around_text.get(index)
        if around is None:
            before, _, behind = self._event(self._text_choice(index, "", None)).rpartition(b'""')
            around = self._around_text[index] = before, behind
        return around[0] + _encode(text) + around[1]

    def _event(self, choice: bytes, members: bytes = b"") -> bytes:
        """A chunk with one choice; `members` of the chunk itself, each with a comma before it."""
        return self._head + choice + b"]" + members + self._tail[1:]

    def _last_event(self, index: int, end: Finished) -> bytes:
        """The chunk that ends a choice; the last of them tells the timings, unless a chunk with the usage follows."""
        self._open_choices -= 1
        last = self._open_choices == 0 and not self.job.include_usage
        return self._event(self._last_choice(index, end), self._timings_member() if last else b"")

    def _timings_member(self) -> bytes:
        timings = self.timings
        return b"" if timings is UNSET else b',"timings":' + _encode(timings)

    def _head_members(self, index: int) -> bytes:
        """What the first chunk of a choice says of the prompt besides."""
        return b""

    def _prompt_members(self, index: int) -> bytes:
        """What was asked for of a choice's prompt, as members of a JSON object, each with a comma before it."""
        members = b""
        if self.job.prompt_logprobs is not None:
            logprobs = prompt_logprobs(self.prompt_of(index), self.job.prompt_logprobs)
            members += b',"prompt_logprobs":' + _encode(logprobs)
        if self.job.return_prompt_token_ids:
            members += b',"prompt_token_ids":' + _encode(list(unpack_ints(self.prompt_of(index).token_ids)))
        return members

    def _token_ids(self, items: Iterable[Delta]) -> list[int]:
        """Ids of the tokens in these deltas; none when none were asked for."""
        if not self.job.return_token_ids:
            return []
        return [token_id for item in items for token_id in unpack_ints(item.token_ids)]

    def end(self, usage: Usage) -> bytes:
        """The events after all choices have finished."""
        if not self.job.include_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage) + self._timings_member() + b"}\n\n" + DONE

    def whole(self, batches: Iterable[Batch], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        count = len(self.job.prompts) * self.job.params.n
        deltas: list[list[Delta]] = [[] for _ in range(count)]
        ends: dict[int, Finished] = {}
        for batch in batches:
            for index, item in batch:
                if isinstance(item, Finished):
                    ends[index] = item
                else:
                    deltas[index].append(item)
        choices = [self._whole(index, deltas[index], ends[index]) for index in range(count)]
        answer: CompletionResponse[Any] = CompletionResponse(
            id=self.id,
            object=self.object_name,
            created=self.created,
            model=self.job.model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
            timings=self.timings,
        )
        self._add_prompt_fields(answer)
        return _encode(answer)

    @abstractmethod
    def _add_prompt_fields(self, answer: CompletionResponse[Any]) -> None:
        """What was asked for of the prompts, where this API says it."""

    def _whole(self, index: int, items: list[Delta], end: Finished) -> ChatChoice | CompletionChoice:
        text = "".join(item.text for item in items)
        positions = [position for item in items for position in item.logprobs]
        choice = self._whole_choice(index, text, self._logprobs(index, positions), self._reason(index, end))
        if end.stop_reason is not None:
            choice.stop_reason = end.stop_reason
        if self.job.return_token_ids:
            choice.token_ids = self._token_ids(items)
        return choice

    @abstractmethod
    def _logprobs(self, index: int, positions: list[PositionLogprobs]) -> ChatLogprobs | CompletionLogprobs | None:
        """Log-probabilities in this API's form; None when none were asked for."""

    @abstractmethod
    def _first_choices(self, index: int) -> list[bytes]:
        """What a choice's stream begins with, before any output."""

    @abstractmethod
    def _text_choice(self, index: int, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None) -> bytes: ...

    def _last_choice(self, index: int, end: Finished) -> bytes:
        stop_reason = b"" if end.stop_reason is None else b',"stop_reason":' + _encode(end.stop_reason)
        form = b'{"index":%d,%b,"logprobs":null,"finish_reason":"%b"%b}'
        return form % (index, self._no_text, self._reason(index, end).encode(), stop_reason)

    def _reason(self, index: int, end: Finished) -> str:
        """Why the choice ended, in this API's words."""
        return end.reason

    @abstractmethod
    def _whole_choice(
        self, index: int, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None, reason: str
    ) -> ChatChoice | CompletionChoice: ...


class ChatResponder(Responder):
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    _no_text = b'"delta":{}'

    def _head_members(self, index: int) -> bytes:
        return self._prompt_members(index)

    def _add_prompt_fields(self, answer: CompletionResponse[Any]) -> None:
        if self.job.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(self.prompt_of(0), self.job.prompt_logprobs)
        if self.job.return_prompt_token_ids:
            answer.prompt_token_ids = list(unpack_ints(self.prompt_of(0).token_ids))

    def _logprobs(self, index: int, positions: list[PositionLogprobs]) -> ChatLogprobs | None:
        if self.job.params.logprobs is None:
            return None
        return ChatLogprobs([_chat_logprob(position) for position in positions])

    def _first_choices(self, index: int) -> list[bytes]:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return [b'{"index":%d,%b' % (index, delta)]

    def _text_choice(self, index: int, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None) -> bytes:
        form = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
        return form % (index, _encode(text), _encode(logprobs))

    def _whole_choice(
        self, index: int, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None, reason: str
    ) -> ChatChoice:
        assert logprobs is None or isinstance(logprobs, ChatLogprobs)
        return ChatChoice(index, AssistantMessage(text), logprobs, reason)


class CompletionResponder(Responder):
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    _no_text = b'"text":""'

    def _echo(self, index: int) -> str:
        return self.prompt_of(index).text if self.job.echo else ""

    def _add_prompt_fields(self, answer: CompletionResponse[Any]) -> None:
        for choice in answer.choices:
            assert isinstance(choice, CompletionChoice)
            if self.job.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(self.prompt_of(choice.index), self.job.prompt_logprobs)
            if self.job.return_prompt_token_ids:
                choice.prompt_token_ids = list(unpack_ints(self.prompt_of(choice.index).token_ids))

    def _logprobs(self, index: int, positions: list[PositionLogprobs]) -> CompletionLogprobs | None:
        if self.job.params.logprobs is None:
            return None
        start = len(self._echo(index))
        return CompletionLogprobs(
            tokens=[position.chosen.token for position in positions],
            token_logprobs=[finite(position.chosen.logprob) for position in positions],
            top_logprobs=[
                {token.token: finite(token.logprob) for token in (*position.top, position.chosen)}
                for position in positions
            ],
            text_offset=[start + position.offset for position in positions],
        )

    def _echoed(self, index: int) -> CompletionLogprobs | None:
        """Log-probabilities of the prompt, where it is echoed with them."""
        top = self.job.params.logprobs
        if top is None or not self.job.echo:
            return None
        return echoed_logprobs(self.prompt_of(index), top)

    def _first_choices(self, index: int) -> list[bytes]:
        members = self._prompt_members(index)
        if not self.job.echo and not members:
            return []
        choice = self._text_choice(index, self._echo(index), self._echoed(index))
        return [choice[:-1] + members + b"}"]

    def _text_choice(self, index: int, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None) -> bytes:
        form = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}'
        return form % (index, _encode(text), _encode(logprobs))

    def _whole_choice(
        self, index: int, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None, reason: str
    ) -> CompletionChoice:
        assert logprobs is None or isinstance(logprobs, CompletionLogprobs)
        echoed = self._echoed(index)
        if echoed is not None and logprobs is not None:
            logprobs = CompletionLogprobs(
                echoed.tokens + logprobs.tokens,
                echoed.token_logprobs + logprobs.token_logprobs,
                echoed.top_logprobs + logprobs.top_logprobs,
                echoed.text_offset + logprobs.text_offset,
            )
        return CompletionChoice(index, self._echo(index) + text, logprobs, reason)


def _no_prompt(index: int) -> PromptInfo:
    raise RuntimeError("nobody has said what the prompt is")


def _top_logprob(token: TokenLogprob) -> TopLogprob:
    return TopLogprob(token.token, finite(token.logprob), list(token.token_bytes))


def _chat_logprob(position: PositionLogprobs) -> ChatLogprob:
    chosen = position.chosen
    top = [_top_logprob(token) for token in position.top]
    return ChatLogprob(chosen.token, finite(chosen.logprob), list(chosen.token_bytes), top)
