"""A server that speaks OpenAI's streaming protocol and misbehaves as it is told; real sockets, no model."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Body = dict[str, Any]
# Answers a request whose stream has begun; what is true afterwards is what the client saw.
Behaviour = Callable[["Stream"], Awaitable[None]]


class Stream:
    """One answer that is being written."""

    def __init__(self, mock: "MockServer", request: web.Request, body: Body) -> None:
        self.mock = mock
        self.request = request
        self.body = body
        coding = {} if mock.encoding is None else {"Content-Encoding": mock.encoding}
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **coding})
        self._begun = False

    async def write(self, data: bytes) -> None:
        """Nothing leaves the server while it stalls."""
        await self.mock.stalled()
        if not self._begun:
            self._begun = True
            await self._response.prepare(self.request)
        await self._response.write(data)

    async def event(self, value: Any) -> None:
        await self.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def chunk(
        self, text: str, finish: str | None = None, token_ids: list[int] | None = None, usage: int | None = None
    ) -> None:
        """`usage`: tokens of the output so far."""
        choice: Body = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if "messages" in self.body else {"text": text}
        if token_ids is not None:
            choice["token_ids"] = token_ids
        told = {} if usage is None else {"usage": {"prompt_tokens": 1, "completion_tokens": usage}}
        await self.event({"choices": [choice], **told})

    async def end(self, tokens: int, **members: Any) -> None:
        """Usage and `[DONE]`."""
        usage = {"prompt_tokens": self.mock.count(self.body), "completion_tokens": tokens}
        await self.event({"choices": [], "usage": usage, **members})
        await self.write(b"data: [DONE]\n\n")

    async def cut(self) -> None:
        """Close the connection as it is."""
        assert self.request.transport is not None
        await asyncio.sleep(0)
        self.request.transport.close()


async def words(stream: Stream) -> None:
    """As many one-word chunks as were asked for."""
    for _ in range(stream.body["max_tokens"]):
        await stream.chunk(" word")
    await stream.chunk("", "length")
    await stream.end(stream.body["max_tokens"])


class MockServer:
    """Use it as a context manager. `behaviours`: by `max_tokens`; the others get `words`.

    `hard_words` are two tokens each; a chat has `template_tokens` around its text. `stall`: seconds after the first
    request, and for how long; `stall_window` then is when, on the monotonic clock. `models`: what /v1/models answers
    instead. `encoding`: the Content-Encoding that streams have by their header. `measures`: False is a tokenmill's
    --no-measure.
    """

    def __init__(
        self,
        *,
        behaviours: dict[int, Behaviour] | None = None,
        owner: str = "mock",
        hard_words: frozenset[str] = frozenset(),
        template_tokens: int = 0,
        stall: tuple[float, float] | None = None,
        models: str | None = None,
        encoding: str | None = None,
        measures: bool = True,
    ) -> None:
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.stall_window = (0.0, 0.0)
        self._behaviours = behaviours or {}
        self._owner = owner
        self._hard_words = hard_words
        self._template_tokens = template_tokens
        self._stall = stall
        self._models_text = models
        self.encoding = encoding
        self._measures = measures
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._main(),), daemon=True)

    def __enter__(self) -> "MockServer":
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def count(self, body: Body) -> int:
        """Tokens of the prompt."""
        if isinstance(body.get("prompt"), list):
            return len(body["prompt"])
        chat = "messages" in body
        text = "".join(message["content"] for message in body["messages"]) if chat else body["prompt"]
        found = sum(2 if word in self._hard_words else 1 for word in text.split())
        return found + self._template_tokens * chat

    async def stalled(self) -> None:
        """Wait while the server stalls."""
        begin, end = self.stall_window
        if begin <= time.monotonic() < end:
            await asyncio.sleep(end - time.monotonic())

    async def stopped(self) -> None:
        """Wait until the server is to end."""
        assert self._stop is not None
        await self._stop.wait()

    async def _main(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        if not self._measures:
            app.router.add_get("/debug/requests", self._not_measured)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._stop = asyncio.Event()
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if self._models_text is not None:
            return web.Response(text=self._models_text)
        return web.json_response({"object": "list", "data": [{"id": "mock-model", "owned_by": self._owner}]})

    async def _not_measured(self, request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "--no-measure", "code": "not_measured"}}, status=404)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self._stall is not None and not self.bodies:
            begin = time.monotonic() + self._stall[0]
            self.stall_window = begin, begin + self._stall[1]
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        unmeasured = not self._measures and "x-tokenmill-timings" in request.headers
        status = 400 if unmeasured else STATUSES.get(body["max_tokens"])
        if status is not None:
            return web.json_response({"error": {"message": f"told to say {status}"}}, status=status)
        stream = Stream(self, request, body)
        await self._behaviours.get(body["max_tokens"], words)(stream)
        return stream._response


# Requests for so many tokens get an error instead.
STATUSES = {401: 429, 402: 503, 403: 400}
