"""A queue in the order of a key that each request keeps for as long as it waits."""

import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterator

from config.schema import SchedulerConfig
from scheduler_proc.policies.base import Policy
from scheduler_proc.request import Request

_Entry = tuple[float, int, Request]  # key, order, request; no two orders are equal, so requests are never compared
_SPARE_ENTRIES = 64  # removed requests that a heap may hold beside as many as it has waiting ones


class KeyedPolicy(Policy):
    """Smallest key first, then first come.

    Short and long requests have a heap each, so that the first short one need not be looked for behind the long ones.
    Removed requests stay in their heap until they reach its top or outnumber the others: all operations are O(log n)
    amortised.
    """

    def __init__(self, config: SchedulerConfig, cached_tokens: Callable[[Request], int]) -> None:
        super().__init__(config, cached_tokens)
        self._waiting: dict[int, _Entry] = {}  # by order
        self._shorts: list[_Entry] = []
        self._longs: list[_Entry] = []

    @abstractmethod
    def key(self, request: Request) -> float:
        """Seconds; a function of what a request arrived with, so that it never changes."""

    def add(self, request: Request) -> None:
        entry = (self.key(request), request.order, request)
        self._waiting[request.order] = entry
        heapq.heappush(self._longs if request.is_long else self._shorts, entry)

    def remove(self, request: Request) -> None:
        del self._waiting[request.order]
        if len(self._shorts) + len(self._longs) > 2 * len(self._waiting) + _SPARE_ENTRIES:
            for heap in (self._shorts, self._longs):
                heap[:] = [entry for entry in heap if self._waits(entry)]
                heapq.heapify(heap)

    def first(self, now: float, longs: bool) -> Request | None:
        top = self._top(self._shorts)
        if longs and (long := self._top(self._longs)) is not None:
            top = long if top is None else min(top, long)
        return None if top is None else top[2]

    def running_key(self, request: Request) -> tuple[float, int]:
        return (self.key(request), request.order)

    def _top(self, heap: list[_Entry]) -> _Entry | None:
        while heap and not self._waits(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _waits(self, entry: _Entry) -> bool:
        # By identity: a preempted request comes back with a new entry, perhaps in the other heap.
        return self._waiting.get(entry[1]) is entry

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._waiting.values())
