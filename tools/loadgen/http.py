"""Streamed requests to any server that speaks OpenAI's protocol."""

import json
import os
import time
from dataclasses import dataclass
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta, Struct

from tools.event_stream import data_lines
from tools.loadgen.answer import Answer
from tools.loadgen.clients import Client, most_tokens
from tools.loadgen.messages import API_KEY_VARIABLE, Item, Target
from tools.loadgen.prompts import Prompts

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


class _Delta(Struct):
    """Text of any kind: what is told first is what the user sees first."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class _Details(Struct):
    cached_tokens: _Count | None = None


class _Usage(Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    timings: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def authorization() -> dict[str, str]:
    """The header with the key that the environment has."""
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True)
class Prepared:
    path: str
    body: bytes


class HttpClient(Client):
    def __init__(self, target: Target, prompts: Prompts) -> None:
        super().__init__(target, prompts)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **authorization()}
        if target.timings:
            self._headers["x-tokenmill-timings"] = "1"
        self._session: aiohttp.ClientSession | None = None

    async def connect(self) -> None:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_chunk_sent.append(_note_written)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            trace_configs=[tracing],
        )

    def prepare(self, item: Item) -> Prepared:
        target = self.target
        fields: dict[str, Any] = {"model": target.model} if target.model else {}
        if item.body:
            fields = json.loads(item.body) | fields
            path = item.path
        else:
            fields |= {"max_tokens": most_tokens(target, item), "temperature": target.temperature}
            if target.api == "tokens" and not item.text:
                path, fields["prompt"] = _COMPLETIONS, self.prompts.token_ids(item)
            else:
                text = item.text or self.prompts.text(item)
                path = _CHAT if target.api == "chat" else _COMPLETIONS
                fields |= {"messages": [{"role": "user", "content": text}]} if path == _CHAT else {"prompt": text}
        options = {"include_usage": True}
        if target.chunk_tokens == "usage":
            options["continuous_usage_stats"] = True
        fields |= {"stream": True, "stream_options": options}
        if target.exact_output and item.output_length:
            fields["ignore_eos"] = True
            if target.tokenmill:
                fields["stop_on_loop"] = 0
        if target.chunk_tokens == "ids":
            fields["return_token_ids"] = "output"  # those of the prompt would come before the first token
        return Prepared(path, msgspec.json.encode(fields))

    async def send(self, prepared: Prepared, request_id: str, answer: Answer) -> None:
        assert self._session is not None
        headers = {**self._headers, "x-request-id": request_id}
        try:
            async with self._session.post(
                self.target.url + prepared.path, data=prepared.body, headers=headers, trace_request_ctx=answer
            ) as response:
                answer.status = response.status
                if response.status != 200:
                    answer.fail_with_status(response.status, _message(await response.read()))
                    return
                if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    # Chunks of a compressed stream do not come as the server sends them.
                    answer.fail("error", f"the stream is compressed ({coding}), although that was not asked for")
                    return
                async for lines in data_lines(response.content.iter_any()):
                    now = time.monotonic()
                    for line in lines:
                        if take_event(line, now, answer, by_usage=self.target.chunk_tokens == "usage"):
                            return
                if response.content_type != "text/event-stream" and not answer.times:
                    answer.fail("empty", f"no token came: the answer is {response.content_type}, no stream of events")
        except (aiohttp.ClientError, OSError) as error:
            answer.fail("truncated" if answer.status else "connection", f"{type(error).__name__}: {error}")
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            answer.fail("error", f"an event that cannot be read: {error}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _note_written(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceRequestChunkSentParams) -> None:
    """The body is the system's now, after all that the client itself does for it, and connecting."""
    context.trace_request_ctx.written = time.monotonic()


def take_event(line: bytes, now: float, answer: Answer, *, by_usage: bool = False) -> bool:
    """Put one event into the answer; true when nothing more is to come.

    `by_usage`: every chunk tells the usage so far, where the server has understood that it was asked to.
    """
    if line == b"[DONE]":
        answer.done = True
        return True
    if not line:
        return False  # no event, as the standard has it
    event = _decode(line)
    if event.error is not None:
        answer.fail("error", _error_text(event.error))
        return True
    told = event.usage.completion_tokens if by_usage and event.usage is not None else None
    for choice in event.choices:
        delta = choice.delta
        text = choice.text or (
            delta is not None and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
        )
        if told is not None and answer.counted:
            if told > answer.received:
                answer.chunk(now, told - answer.received)
        elif text or choice.token_ids:
            answer.chunk(now, len(choice.token_ids) if choice.token_ids else None)
        if choice.finish_reason is not None:
            answer.finish_reason = choice.finish_reason
    if event.usage is not None:
        answer.prompt_tokens = event.usage.prompt_tokens
        answer.completion_tokens = event.usage.completion_tokens
        if event.usage.prompt_tokens_details is not None:
            answer.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
    if isinstance(event.timings, dict) and "choices" in event.timings:  # llama.cpp has others under this name
        answer.timings = event.timings
    return False


def _error_text(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _message(body: bytes) -> str:
    """Of an error's body, what it says."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode("utf-8", "replace")
    return _error_text(value["error"] if isinstance(value, dict) and "error" in value else value)
