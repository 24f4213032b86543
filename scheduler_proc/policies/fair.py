"""Fair shares of the engine's tokens per tenant: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995)."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice

from config.schema import SchedulerConfig
from scheduler_proc.policies.base import Policy
from scheduler_proc.policies.fcfs import FirstComeFirstServed
from scheduler_proc.request import Request

QUANTUM = 512  # tokens that each waiting tenant may use in a round
_LOOKS_PER_TURN = 2  # at debts that may be worked off: more than can be made in a turn, so that none is kept for long


class _Tenant:
    """One API key: its waiting requests, first come first served, and what it may use or owes."""

    __slots__ = ("deficit", "queue", "round")

    def __init__(self, queue: FirstComeFirstServed, now: int) -> None:
        self.queue = queue
        self.deficit = 0  # tokens; below 0 it has used more than its share
        self.round = now  # in which it last had a turn, or ceased to wait

    def work_off(self, now: int) -> None:
        """Bring the account of a tenant that has not been waiting up to this round."""
        self.deficit = min(0, self.deficit + (now - self.round) * QUANTUM)
        self.round = now


class DeficitRoundRobin(Policy):
    """Tenants take turns; each turn allows QUANTUM further tokens, and requests start while the allowance covers them.

    A start costs the prompt tokens that are not cached, and then each output costs one token, which may bring the
    allowance below 0. Between tenants that keep waiting, prompt tokens started differ by at most QUANTUM plus the
    largest prompt, outputs apart. Tokens cost nothing while nobody waits, and when the queue runs empty all accounts
    are closed; a tenant with nothing waiting keeps no allowance, works off a debt as if it were waiting, and is then
    forgotten.

    Within a tenant nobody is overtaken. Between tenants, a request at the head waits for at most
    (its prompt + its tenant's debt) / QUANTUM + 1 rounds, in each of which every other tenant may use QUANTUM plus one
    prompt. Preempted requests go before all others.

    A turn costs O(1), whatever the number of tenants, and on average there is one for each start and each QUANTUM
    tokens used; but tenants that wait with nothing except long requests which are held up are looked at in vain.
    """

    def __init__(self, config: SchedulerConfig, cached_tokens: Callable[[Request], int]) -> None:
        super().__init__(config, cached_tokens)
        self._returning = FirstComeFirstServed(config, cached_tokens)  # preempted ones
        self._ring: OrderedDict[str, _Tenant] = OrderedDict()  # those with waiting requests; the first has the turn
        self._turn_begun = False  # the first one has been given what its turn allows
        self._debtors: OrderedDict[str, _Tenant] = OrderedDict()  # without waiting requests
        self._rounds = 0
        self._num_waiting = 0  # in the ring
        self._costs: dict[int, int] = {}  # by order, of requests that are or were at the head

    @property
    def num_debtors(self) -> int:
        """Tenants with nothing waiting that still work off a debt, as far as that has been noticed."""
        return len(self._debtors)

    def add(self, request: Request) -> None:
        if request.preemptions:
            self._returning.add(request)
            return
        tenant = self._ring.get(request.tenant)
        if tenant is None:
            tenant = self._debtors.pop(request.tenant, None) or self._new_tenant()
            tenant.work_off(self._rounds)
            # Last but the one whose turn it is: behind that one, it would be next again as often as it came back.
            self._ring[request.tenant] = tenant
        tenant.queue.add(request)
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        if request.preemptions:
            self._returning.remove(request)
        else:
            tenant = self._ring[request.tenant]
            tenant.queue.remove(request)
            self._num_waiting -= 1
            self._costs.pop(request.order, None)
            if request.cached_tokens >= 0:  # it starts: the cache has been asked; else it was aborted
                tenant.deficit -= request.num_prompt - request.cached_tokens
            if not tenant.queue:
                self._leave(request.tenant)
        if not len(self):
            self._debtors.clear()

    def ahead_of(self, request: Request) -> list[Request]:
        """Its own tenant's queue, and of each other's as many as may have their turns before it."""
        own = self._ring.get(request.tenant)
        before = list(own.queue) if own is not None else []
        ahead = [*self._returning, *before]
        for tenant in self._ring.values():
            if tenant is not own:
                ahead += islice(tenant.queue, len(before) + 1)
        return ahead

    def served(self, request: Request, tokens: int) -> None:
        # A prompt has been paid for at the start.
        if self._ring and request.num_planned > request.num_known:
            name = request.tenant
            tenant = self._ring.get(name) or self._debtors.get(name)
            if tenant is None:
                tenant = self._debtors[name] = self._new_tenant()
            tenant.deficit -= tokens

    def first(self, now: float, longs: bool) -> Request | None:
        if (returning := self._returning.first(now, longs)) is not None:
            return returning
        turns = in_vain = 0
        while in_vain < len(self._ring):
            tenant = next(iter(self._ring.values()))
            head = tenant.queue.first(now, longs)
            if head is None:
                in_vain += 1
            elif self._may_start(tenant, head):
                return head
            else:
                in_vain = 0
            self._pass_turn()
            turns += 1
            if turns == len(self._ring) + 1:
                self._skip_rounds(now, longs)
        return None

    def _may_start(self, tenant: _Tenant, head: Request) -> bool:
        """Whether the allowance of the tenant whose turn it is covers its first request."""
        lacks = tenant.deficit < self._cost(head)
        if not self._turn_begun:
            self._turn_begun = True
            if tenant.round >= self._rounds:
                self._rounds += 1
            tenant.round = self._rounds
            # One that could have started before, and was held up as a long request, does not gain by it.
            if lacks:
                tenant.deficit += QUANTUM
                lacks = tenant.deficit < self._cost(head)
        return not lacks

    def _pass_turn(self) -> None:
        self._ring.move_to_end(next(iter(self._ring)))
        self._turn_begun = False
        for name in list(islice(self._debtors, _LOOKS_PER_TURN)):
            tenant = self._debtors[name]
            tenant.work_off(self._rounds)
            if tenant.deficit == 0:
                del self._debtors[name]
            else:
                self._debtors.move_to_end(name)

    def _skip_rounds(self, now: float, longs: bool) -> None:
        """After a round in which nobody could start: all those that would pass in the same way, at once."""
        waiting = [(tenant, tenant.queue.first(now, longs)) for tenant in self._ring.values()]
        heads = [(tenant, head) for tenant, head in waiting if head is not None]
        lacking = [-((tenant.deficit - self._cost(head)) // QUANTUM) for tenant, head in heads]
        rounds = max(0, min(lacking, default=0) - 1)
        self._rounds += rounds
        for tenant, _ in heads:
            tenant.deficit += rounds * QUANTUM
            tenant.round += rounds

    def _cost(self, request: Request) -> int:
        cost = self._costs.get(request.order)
        if cost is None:
            cost = self._costs[request.order] = request.num_prompt - self._cached_tokens(request)
        return cost

    def _new_tenant(self) -> _Tenant:
        return _Tenant(FirstComeFirstServed(self._config, self._cached_tokens), self._rounds)

    def _leave(self, name: str) -> None:
        if name == next(iter(self._ring)):
            self._turn_begun = False
        tenant = self._ring.pop(name)
        if tenant.deficit < 0:
            tenant.round = self._rounds
            self._debtors[name] = tenant

    def __len__(self) -> int:
        return len(self._returning) + self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returning, *(tenant.queue for tenant in self._ring.values()))
