"""Fair shares of the engine's tokens per tenant: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995)."""

from collections.abc import Callable, Iterator
from itertools import chain, islice

from config.schema import SchedulerConfig
from scheduler_proc.policies.base import Policy
from scheduler_proc.policies.fcfs import FirstComeFirstServed
from scheduler_proc.request import Request

QUANTUM = 512  # tokens that each waiting tenant may use in a round


class _Tenant:
    """One API key: its waiting requests, first come first served, and what it may use or owes."""

    __slots__ = ("deficit", "left_in", "queue")

    def __init__(self, queue: FirstComeFirstServed, rounds: int) -> None:
        self.queue = queue
        self.deficit = 0  # tokens; below 0 it has used more than its share
        self.left_in = rounds  # the round in which it ceased to wait


class DeficitRoundRobin(Policy):
    """Tenants take turns; each turn allows QUANTUM further tokens, and requests start while the allowance covers them.

    A start costs the prompt tokens that are not cached, and then each output costs one token, which may bring the
    allowance below 0. Between tenants that keep waiting, prompt tokens started differ by at most QUANTUM plus the
    largest prompt, outputs apart. Tokens cost nothing while nobody waits, and when the queue runs empty all accounts
    are closed; a tenant with nothing waiting keeps no allowance, and works off a debt as if it were waiting.

    Within a tenant nobody is overtaken. Between tenants, a request at the head waits for at most
    (its prompt + its tenant's debt) / QUANTUM + 1 rounds, in each of which every other tenant may use QUANTUM plus one
    prompt. Preempted requests go before all others.
    """

    def __init__(self, config: SchedulerConfig, cached_tokens: Callable[[Request], int]) -> None:
        super().__init__(config, cached_tokens)
        self._returning = FirstComeFirstServed(config, cached_tokens)  # preempted ones
        self._tenants: dict[str, _Tenant] = {}
        self._ring: list[_Tenant] = []  # those with waiting requests
        self._turn = -1  # index of the tenant whose turn it is; -1: the next turn is the first one's
        self._rounds = 0
        self._costs: dict[int, int] = {}  # by order, of requests that are or were at the head

    def add(self, request: Request) -> None:
        if request.preemptions:
            self._returning.add(request)
            return
        tenant = self._tenant(request.tenant)
        if not tenant.queue:
            tenant.deficit = min(0, tenant.deficit + (self._rounds - tenant.left_in) * QUANTUM)
            # Last but the one whose turn it is: behind that one, it would be next again as often as it came back.
            place = self._turn if self._turn >= 0 else len(self._ring)
            self._ring.insert(place, tenant)
            self._turn += self._turn >= 0
        tenant.queue.add(request)

    def remove(self, request: Request) -> None:
        if request.preemptions:
            self._returning.remove(request)
        else:
            tenant = self._tenants[request.tenant]
            tenant.queue.remove(request)
            self._costs.pop(request.order, None)
            if request.cached_tokens >= 0:  # it starts: the cache has been asked; else it was aborted
                tenant.deficit -= request.num_prompt - request.cached_tokens
            if not tenant.queue:
                self._leave(tenant)
        if not len(self):
            self._tenants.clear()

    def ahead_of(self, request: Request) -> list[Request]:
        """Its own tenant's queue, and of each other's as many as may have their turns before it."""
        own = self._tenants.get(request.tenant)
        before = list(own.queue) if own is not None else []
        ahead = [*self._returning, *before]
        for tenant in self._ring:
            if tenant is not own:
                ahead += islice(tenant.queue, len(before) + 1)
        return ahead

    def served(self, request: Request, tokens: int) -> None:
        # A prompt has been paid for at the start.
        if self._ring and request.num_planned > request.num_known:
            self._tenant(request.tenant).deficit -= tokens

    def first(self, now: float, longs: bool) -> Request | None:
        if (returning := self._returning.first(now, longs)) is not None:
            return returning
        if self._turn >= 0:
            tenant = self._ring[self._turn]
            head = tenant.queue.first(now, longs)
            if head is not None and tenant.deficit >= self._cost(head):
                return head
        return self._next_turn(now, longs)

    def _next_turn(self, now: float, longs: bool) -> Request | None:
        """Pass the turn on until a tenant can start the request at its head: as many rounds at once as that takes."""
        heads: list[tuple[_Tenant, int, Request]] = []  # in the order of their next turns, with their index in the ring
        size = len(self._ring)
        for offset in range(1, size + 1):
            index = (self._turn + offset) % size
            if (head := self._ring[index].queue.first(now, longs)) is not None:
                heads.append((self._ring[index], index, head))
        if not heads:
            return None
        quanta = [
            max(0, -((tenant.deficit - self._cost(head)) // QUANTUM)) for tenant, _, head in heads
        ]  # that it lacks
        turns, place = min((max(1, lacking), place) for place, lacking in enumerate(quanta))
        for other, (tenant, _, _) in enumerate(heads):
            # One that could have started before, and was held up as a long request, does not gain by it.
            if quanta[other]:
                tenant.deficit += QUANTUM * (turns if other <= place else turns - 1)
        _, index, head = heads[place]
        self._rounds += turns if index <= self._turn else turns - 1
        self._turn = index
        return head

    def _cost(self, request: Request) -> int:
        cost = self._costs.get(request.order)
        if cost is None:
            cost = self._costs[request.order] = request.num_prompt - self._cached_tokens(request)
        return cost

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            queue = FirstComeFirstServed(self._config, self._cached_tokens)
            tenant = self._tenants[name] = _Tenant(queue, self._rounds)
        return tenant

    def _leave(self, tenant: _Tenant) -> None:
        index = self._ring.index(tenant)
        del self._ring[index]
        if index <= self._turn:
            self._turn -= 1
        tenant.left_in = self._rounds

    def __len__(self) -> int:
        return len(self._returning) + sum(len(tenant.queue) for tenant in self._ring)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returning, *(tenant.queue for tenant in self._ring))
