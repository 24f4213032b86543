"""The answer to one request, as it arrives."""

import asyncio
from collections.abc import AsyncIterator, Callable

from .errors import RequestFailed, error_of
from .messages import Delta, Failed, Finished, PromptInfo


class Stream:
    """The answer to one request. Iterate over it: each item is a non-empty list of what arrived together.

    It ends when every choice has `Finished`, or raises `RequestFailed`. `deliver` does the same with a callback.
    """

    def __init__(self, request_id: int, choices: int, on_abort: Callable[["Stream"], None]) -> None:
        self.request_id = request_id
        self.sent = False  # to a server; else it has failed at once
        self.prompt: PromptInfo | None = None  # before the first item, of a request that asked for it
        self._open_choices = choices
        self._on_abort = on_abort
        self._items: list[Delta | Finished] = []
        self._error: RequestFailed | None = None
        self._aborted = False
        self._take: Callable[[list[Delta | Finished]], None] | None = None  # of `deliver`
        self._waiter: asyncio.Future[None] | None = None  # of whoever iterates; an Event costs more for each token

    @property
    def done(self) -> bool:
        """True when nothing more will arrive."""
        return self._aborted or self._error is not None or self._open_choices == 0

    @property
    def complete(self) -> bool:
        """True when every choice has come to its end."""
        return self._open_choices == 0

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

    def give_up(self, error: RequestFailed) -> None:
        """Stop the generation, with `error` for whoever iterates. Does nothing to a stream that has ended."""
        if not self.done:
            self._error = error
            self._on_abort(self)
            self._hand_on()

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
        if self._error is not None:
            raise self._error

    def _put(self, item: Delta | Finished | Failed | PromptInfo) -> None:
        """Keep what arrives; `_hand_on` is to be called when there is nothing more of this moment."""
        if isinstance(item, Delta):
            self._items.append(item)
        elif isinstance(item, PromptInfo):
            self.prompt = item
        elif isinstance(item, Failed):
            self._error = error_of(item)
        else:
            self._items.append(item)
            self._open_choices -= 1

    def _fail(self, error: RequestFailed) -> None:
        """End it by an error that the server does not know of; `_hand_on` is to be called as after `_put`."""
        self._error = error

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
            elif self._error is not None:
                raise self._error
            elif self.done:
                return
