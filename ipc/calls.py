"""One request of a service: its attempts, until one begins to be answered, within its deadline.

What is sent again is what was never answered: nothing of the answer has come, and the failure says that the server does
not work on it any more (it was refused, or the connection broke, which makes the server abort it), or that it will
recognise it by its idempotency key.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from .engine_client import EngineClient, RequestOptions, Route
from .errors import (
    Conflict,
    DeadlineExceeded,
    Overloaded,
    RequestFailed,
    Unavailable,
    bad_request,
    cancelled,
    deadline_exceeded,
    unavailable,
)
from .messages import Delta, Finished, PromptInfo
from .stream import Stream
from .validation import MAX_DEADLINE, MIN_DEADLINE, InvalidRequest, validate_options

T = TypeVar("T")

MAX_RETRIES = 100
_FIRST_PAUSE = 0.1  # seconds; doubled each time
_LONGEST_PAUSE = 5.0
_AWAY_SECONDS = 60.0  # that a call without a deadline waits for a server that is away


class Patience:
    """How long a call waits and how often it tries: its deadline in seconds, from now on, and its retries."""

    def __init__(self, engine: EngineClient, deadline: float | None, retries: int) -> None:
        """`BadRequest` for a number that is out of bounds."""
        if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= MAX_RETRIES:
            raise bad_request(0, f"retries must be an integer between 0 and {MAX_RETRIES}", "retries")
        try:
            validate_options(deadline=deadline)
        except InvalidRequest as error:
            raise bad_request(0, error.message, error.param) from None
        self._engine = engine
        self._seconds = deadline
        self._until = None if deadline is None else time.monotonic() + deadline
        self.retries = retries
        self.attempts = 0  # that were sent
        self._failures = 0

    def left(self) -> float | None:
        """Seconds until the deadline; None: there is none. `DeadlineExceeded` when it is over."""
        if self._until is None:
            return None
        left = self._until - time.monotonic()
        if left < MIN_DEADLINE:
            raise self.exceeded()
        return min(left, MAX_DEADLINE)

    def exceeded(self, request_id: int = 0) -> RequestFailed:
        return deadline_exceeded(request_id, self._seconds or 0.0)

    async def after(self, error: RequestFailed, route: Route) -> None:
        """Wait until it makes sense to try again by `route` after `error`, or raise it, when it makes none."""
        pause = self._pause(error)
        if pause is None or self._failures > self.retries:
            raise error
        if self._until is not None and time.monotonic() + pause >= self._until:
            raise error
        await asyncio.sleep(pause)
        if isinstance(error, Unavailable):
            await self._wait(route, error)

    async def before(self, route: Route) -> None:
        """Connect, where nobody has: what cannot have been sent yet is no failure."""
        if self._engine.is_new:
            await self._wait(route, unavailable(0, "no server is ready"))

    async def _wait(self, route: Route, error: RequestFailed) -> None:
        left = self.left()
        try:
            await self._engine.wait_for(route, _AWAY_SECONDS if left is None else left)
        except TimeoutError:
            self.left()
            raise error from None

    def _pause(self, error: RequestFailed) -> float | None:
        """Seconds until the next attempt; None: it could not help. Counts the failures."""
        if isinstance(error, Conflict) and error.retry_after is not None and self.attempts > 1:
            # The attempt before still runs on the server: no failure, but an answer to wait for.
            return max(error.retry_after, _FIRST_PAUSE) * random.uniform(1.0, 1.25)
        self._failures += 1
        pause: float = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self._failures - 1)) * random.uniform(0.5, 1.0)
        if isinstance(error, Unavailable):
            return pause
        if isinstance(error, Overloaded) and error.retry_after is not None:
            return error.retry_after * random.uniform(1.0, 1.25) + pause
        return None

    async def question(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question that changes nothing, however often it is asked."""
        self._engine.check_place()
        await self.before(Route())
        while True:
            try:
                async with asyncio.timeout(self.left()):
                    return await ask()
            except TimeoutError:
                raise self.exceeded() from None
            except RequestFailed as error:
                failure = error
            await self.after(failure, Route())


class Call:
    """A generation or an embedding; `start` sends it."""

    def __init__(
        self, start: Callable[[RequestOptions, Route], Stream], patience: Patience, options: RequestOptions
    ) -> None:
        self._start = start
        self._patience = patience
        self._options = options
        self._route = Route(options.get("idempotency_key", ""))  # a random key binds it to no process
        if patience.retries and not options.get("idempotency_key"):
            self._options = {**options, "idempotency_key": f"auto-{os.urandom(12).hex()}"}
        self._stream: Stream | None = None
        self._aborted = False

    @property
    def attempts(self) -> int:
        return self._patience.attempts

    @property
    def prompt(self) -> PromptInfo | None:
        return None if self._stream is None else self._stream.prompt

    def abort(self) -> None:
        """End it; whoever iterates gets `Cancelled`. Does nothing once it has ended."""
        self._aborted = True
        if self._stream is not None:
            self._stream.abort()

    async def batches(self) -> AsyncIterator[list[Delta | Finished]]:
        """What arrives, as `Stream` yields it; to be iterated once. Raises `RequestFailed`."""
        patience = self._patience
        began = False
        await patience.before(self._route)
        while not self._aborted:
            left = patience.left()
            stream = self._stream = self._start({**self._options, "deadline": left}, self._route)
            patience.attempts += stream.sent
            timer = None
            if left is not None:
                too_late = patience.exceeded(stream.request_id)
                timer = asyncio.get_running_loop().call_later(left, stream.give_up, too_late)
            try:
                async for items in stream:
                    began = True
                    yield items
                if stream.complete:
                    return
                break  # aborted
            except DeadlineExceeded:  # the server's, which may come first
                raise patience.exceeded(stream.request_id) from None
            except RequestFailed as error:
                if began:
                    raise
                failure = error
            finally:
                if timer is not None:
                    timer.cancel()
                stream.abort()
            self._route.failed(failure)
            await patience.after(failure, self._route)
        raise cancelled(0)
