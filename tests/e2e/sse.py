"""A small HTTP client for tests: plain requests and event streams, many at once, without any client library's help."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Answer:
    """What one request got back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None  # of an answer that is not a stream
    events: list[Any] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # of the events with text, in time.perf_counter()
    done: bool = False  # [DONE] came
    broken: str = ""  # the connection broke: how
    first_text: float = 0.0  # seconds from sending
    ended: float = 0.0

    @property
    def text(self) -> str:
        """All text of choice 0."""
        if self.body is not None:
            choice = self.body["choices"][0]
            return choice["text"] if "text" in choice else choice["message"]["content"]
        return "".join(text_of(event) for event in self.events)

    @property
    def usage(self) -> dict[str, Any]:
        if self.body is not None:
            return self.body["usage"]
        return next(event["usage"] for event in reversed(self.events) if event.get("usage"))

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object, whether it was the answer or an event of the stream."""
        if isinstance(self.body, dict) and "error" in self.body:
            return self.body["error"]
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def finish_reason(self) -> str | None:
        choices = [self.body] if self.body else self.events
        reasons = [choice["finish_reason"] for event in choices for choice in event.get("choices", ())]
        return next((reason for reason in reasons if reason is not None), None)


def text_of(event: Any) -> str:
    """Text of choice 0 in one event."""
    for choice in event.get("choices", ()):
        if choice["index"] == 0:
            return (choice.get("text") if "text" in choice else choice["delta"].get("content")) or ""
    return ""


async def post(session: aiohttp.ClientSession, url: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
    """POST a JSON body and take the answer in, stream or not; a broken connection is part of the answer."""
    answer = Answer()
    start = time.perf_counter()
    try:
        async with session.post(url, json=body, headers=headers) as response:
            answer.status = response.status
            answer.headers = dict(response.headers)
            if response.content_type != "text/event-stream":
                answer.body = await response.json()
            else:
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    if line.startswith(b"data: [DONE]"):
                        answer.done = True
                        continue
                    answer.events.append(json.loads(line[6:]))
                    if text_of(answer.events[-1]):
                        answer.arrivals.append(time.perf_counter())
                        answer.first_text = answer.first_text or answer.arrivals[0] - start
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter() - start
    return answer


def client_session() -> aiohttp.ClientSession:
    """A session with no limits of its own."""
    timeout = aiohttp.ClientTimeout(total=600)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


def post_all(url: str, bodies: list[Any], *, at_once: bool = True) -> list[Answer]:
    """All bodies to one URL, at once or one after the other."""

    async def main() -> list[Answer]:
        async with client_session() as session:
            if at_once:
                return await asyncio.gather(*[post(session, url, body) for body in bodies])
            return [await post(session, url, body) for body in bodies]

    return asyncio.run(main())
