"""Longest cached prefix first: what is in the cache is used before it is evicted."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice

from config.schema import SchedulerConfig
from scheduler_proc.policies.base import Policy
from scheduler_proc.policies.fcfs import FirstComeFirstServed
from scheduler_proc.request import Request

WINDOW = 64  # requests, the oldest waiting short ones and as many long ones, among which the longest prefix is sought
_LOOKUPS_PER_CALL = 2  # prefixes grow and are evicted: the oldest lookups are made again, so many in each call

_Queue = OrderedDict[int, Request]  # by order; a dict's first item gets slow to find once many before it were deleted


class LongestPrefixFirst(Policy):
    """Most cached tokens first, then first come.

    A request that has waited `priority_age_seconds` goes before all that arrived after it, and preempted requests go
    before all others: so nobody is overtaken by a later arrival for longer than `priority_age_seconds`.
    """

    def __init__(self, config: SchedulerConfig, cached_tokens: Callable[[Request], int]) -> None:
        super().__init__(config, cached_tokens)
        self._returning = FirstComeFirstServed(config, cached_tokens)  # preempted ones
        self._shorts: _Queue = OrderedDict()
        self._longs: _Queue = OrderedDict()
        self._cached: dict[int, int] = {}  # order -> cached tokens, the oldest lookup first

    def add(self, request: Request) -> None:
        if request.preemptions:
            self._returning.add(request)
        else:
            self._queue(request)[request.order] = request

    def remove(self, request: Request) -> None:
        if request.preemptions:
            self._returning.remove(request)
        else:
            del self._queue(request)[request.order]
            self._cached.pop(request.order, None)

    def _queue(self, request: Request) -> _Queue:
        return self._longs if request.is_long else self._shorts

    def first(self, now: float, longs: bool) -> Request | None:
        if (returning := self._returning.first(now, longs)) is not None:
            return returning
        queues = [queue for queue in ((self._shorts, self._longs) if longs else (self._shorts,)) if queue]
        if not queues:
            return None
        oldest = min((next(iter(queue.values())) for queue in queues), key=lambda request: request.order)
        if now - oldest.arrival >= self._config.priority_age_seconds:
            return oldest
        window = [request for queue in queues for request in islice(queue.values(), WINDOW)]
        self._look_up(window)
        return max(window, key=lambda request: (self._cached[request.order], -request.order))

    def _look_up(self, window: list[Request]) -> None:
        new = [request for request in window if request.order not in self._cached]
        for order in list(islice(self._cached, _LOOKUPS_PER_CALL)):
            del self._cached[order]
            # Who has entered the window leaves it only by being removed, since all before it are older.
            new.append(self._shorts.get(order) or self._longs[order])
        for request in new:
            self._cached[request.order] = self._cached_tokens(request)

    def __len__(self) -> int:
        return len(self._returning) + len(self._shorts) + len(self._longs)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returning, self._shorts.values(), self._longs.values())
