"""One request's answer as it comes in, and what it amounts to in the end."""

import asyncio
from collections.abc import Callable
from typing import Any

from tools.loadgen.messages import Item, Outcome, Record

_REFUSALS = (429, 503)
_DETAIL_LENGTH = 300


class Answer:
    """Filled by a client. Times are on the clock of `time.monotonic`."""

    def __init__(self) -> None:
        self.sent = self.ended = 0.0
        self.written: float | None = None  # when the system had all of the request
        self.status = 0
        self.times: list[float] = []
        self.tokens: list[int] = []  # of each chunk, as far as the server says
        self.counted = True  # it says so for each chunk
        self.received = 0  # tokens so far; chunks, where it does not say
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False  # the answer came to its proper end
        self.timings: dict[str, Any] | None = None
        self._failure: tuple[Outcome, str] | None = None

    def chunk(self, now: float, tokens: int | None) -> None:
        """A chunk with text or tokens; `tokens` is None where the server does not say how many."""
        self.times.append(now)
        self.tokens.append(tokens or 1)
        self.received += tokens or 1
        if tokens is None:
            self.counted = False

    def fail(self, outcome: Outcome, detail: str) -> None:
        """The first failure is the one that counts."""
        if self._failure is None:
            self._failure = outcome, detail[:_DETAIL_LENGTH]

    def fail_with_status(self, status: int, detail: str) -> None:
        self.status = status
        self.fail("refused" if status in _REFUSALS else "http", f"{status}: {detail}")

    def outcome(self) -> tuple[Outcome, str]:
        """What it is, and in words why it is not "ok"."""
        if self._failure is not None:
            return self._failure
        if self.finish_reason is None:
            return ("truncated", "it ended without a finish_reason") if self.times else ("empty", "no token came")
        if not self.done:
            return "truncated", "it ended without [DONE]"
        return ("ok", "") if self.times else ("empty", "no token came")

    def record(self, item: Item, request_id: str, worker: int, due: float, start: float) -> Record:
        """Of an answer that has ended. `due`: seconds from `start`, the run's beginning."""
        outcome, detail = self.outcome()
        # Without the server's word for each chunk, chunks are tokens only when there are as many of them.
        counted = self.counted or self.completion_tokens == len(self.times)
        return Record(
            id=request_id,
            index=item.index,
            worker=worker,
            scheduled=due,
            sent=self.sent - start,
            ended=self.ended - start,
            outcome=outcome,
            status=self.status,
            detail=detail,
            input_length=item.input_length,
            output_length=item.output_length,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            finish_reason=self.finish_reason,
            written=None if self.written is None else self.written - start,
            times=[time - start for time in self.times],
            tokens=self.tokens if counted else [],
            timings=self.timings,
        )


async def within(seconds: float, answer: Answer, work: Callable[[], Any]) -> None:
    """Await `work()`; what lasts longer, or is cancelled, is a failure of the answer."""
    try:
        async with asyncio.timeout(seconds):
            await work()
    except TimeoutError:
        answer.fail("timeout", f"not ended after {seconds:g} s")
    except asyncio.CancelledError:
        answer.fail("cancelled", "the run was stopped")
