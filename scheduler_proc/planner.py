"""Chooses what the next step computes: which requests, how many tokens of each.

One rule for prefill, chunked prefill, prefix hits and decode: a running request is given tokens until it has caught up.
Those that are one token behind (decode) come first, so that a long prompt never delays them; the rest of the budget
goes to prompts in order of arrival, first those already running, then new ones.
"""

from bisect import insort
from dataclasses import dataclass, field

from config.schema import SchedulerConfig
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request, State


@dataclass(slots=True)
class Scheduled:
    """A request's share of one step."""

    request: Request
    epoch: int
    start: int
    count: int
    sample: bool


@dataclass(slots=True)
class Step:
    """What was decided for one step; `core` turns it into a `StepPlan`."""

    scheduled: list[Scheduled] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    grown: list[tuple[Request, int, list[int]]] = field(default_factory=list)  # request, first new index, block ids
    freed_rows: list[int] = field(default_factory=list)  # of preempted requests


class Planner:
    """The queues of waiting and running requests. Holds no step in flight and sends nothing."""

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        assert config.max_step_tokens is not None
        assert config.prefill_chunk is not None
        self._max_step_tokens = config.max_step_tokens
        self._prefill_chunk = config.prefill_chunk
        self._max_seqs = config.max_seqs
        self._kv = kv
        self._free_rows = list(range(config.max_seqs - 1, -1, -1))
        self.waiting: list[tuple[int, Request]] = []  # by order of arrival
        self.running: list[tuple[int, Request]] = []  # likewise
        self._order: dict[Request, int] = {}
        self._next_order = 0
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """A new request joins the queue."""
        self._order[request] = self._next_order
        self.waiting.append((self._next_order, request))
        self._next_order += 1

    def remove(self, request: Request, last_step: int | None) -> int | None:
        """Forget a request that has ended, wherever it is; returns the row it held."""
        entry = (self._order.pop(request), request)
        row = None
        if request.state is State.WAITING:
            self.waiting.remove(entry)
        else:
            self.running.remove(entry)
            row = self._vacate(request, last_step)
        request.state = State.ENDED
        return row

    def _vacate(self, request: Request, last_step: int | None) -> int:
        row = request.row
        self._kv.release(request, last_step)
        self._free_rows.append(row)
        request.row = -1
        request.num_unknown = 0
        return row

    def plan(self, last_step: int | None) -> Step:
        """Decide the next step. `last_step` is the last one in flight, or None when the device is idle."""
        step = Step()
        budget = self._max_step_tokens
        prefills: list[Request] = []
        victims: set[Request] = set()
        for _, request in list(self.running):
            if not request.wants_more:
                continue  # its last output is being sampled, and needs no computing of its own
            if request.num_tokens - request.num_planned > 1:
                prefills.append(request)
            elif budget > 0 and request not in victims and self._make_room(request, step, victims, last_step):
                budget -= self._give(request, 1, step)
        for request in prefills:
            if budget == 0:
                break
            if request not in victims:
                budget -= self._give(request, budget, step)
        if not victims:  # what was just taken from one request is not for a newcomer
            self._admit(budget, step)
        return step

    def _give(self, request: Request, budget: int, step: Step) -> int:
        """Put up to `budget` tokens of a request into the step; returns how many."""
        count = min(request.num_tokens - request.num_planned, self._prefill_chunk, budget)
        start = request.num_planned
        request.num_planned += count
        sample = request.num_planned == request.num_tokens
        if sample:
            request.num_unknown += 1
        step.scheduled.append(Scheduled(request, request.epoch, start, count, sample))
        return count

    def _make_room(self, request: Request, step: Step, victims: set[Request], last_step: int | None) -> bool:
        """Give a decoding request a block for its next position, at the cost of younger requests if need be."""
        first = len(request.block_table)
        while (fresh := self._kv.grow(request, request.num_planned + 1)) is None:
            if self._kv.pool.num_in_transit:
                return False  # blocks are on their way back: wait a step instead of preempting more
            victim = self.running[-1][1]
            if victim is request:
                return False  # the youngest waits for the older ones to end
            self._preempt(victim, step, last_step)
            victims.add(victim)
        if fresh:
            step.grown.append((request, first, fresh))
        return True

    def _preempt(self, request: Request, step: Step, last_step: int | None) -> None:
        """Take everything from a running request; it queues again at its old place and will be recomputed."""
        entry = (self._order[request], request)
        self.running.remove(entry)
        step.freed_rows.append(self._vacate(request, last_step))
        request.state = State.WAITING
        request.epoch += 1
        insort(self.waiting, entry, key=lambda waiting: waiting[0])
        self.num_preemptions += 1

    def _admit(self, budget: int, step: Step) -> None:
        """Start waiting requests in order, as long as rows, tokens and blocks last."""
        while self.waiting and self._free_rows and budget > 0:
            entry = self.waiting[0]
            request = entry[1]
            # Each running request may soon need one more block; without that reserve the newcomer would be preempted.
            if not self._kv.admit(request, reserve=len(self.running)):
                return
            del self.waiting[0]
            insort(self.running, entry, key=lambda running: running[0])
            request.row = self._free_rows.pop()
            request.state = State.RUNNING
            if request.cached_tokens < 0:
                request.cached_tokens = request.num_planned
            step.admitted.append(request)
            budget -= self._give(request, budget, step)
