"""Scheduling policies: each against its definition on random histories, and its bound on how long one is overtaken."""

from array import array
from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from config.schema import PolicyName, SchedulerConfig
from ipc.engine_messages import SamplingSpec, Submit
from scheduler_proc.policies import make_policy
from scheduler_proc.policies.base import Policy
from scheduler_proc.policies.fair import QUANTUM, DeficitRoundRobin
from scheduler_proc.policies.longest_prefix import WINDOW
from scheduler_proc.request import Request

AGE = 10.0  # seconds
SAMPLING = SamplingSpec()


def make_request(
    order: int,
    *,
    arrival: float = 0.0,
    prompt: int = 4,
    tenant: str = "",
    priority: int = 0,
    target: float | None = None,
    is_long: bool = False,
) -> Request:
    submit = Submit(
        order,
        b"",
        1,
        0,
        b"",
        SAMPLING,
        tenant=tenant,
        priority=priority,
        ttft_target_ms=None if target is None else target * 1e3,
    )
    request = Request(b"peer", submit, array("i", bytes(4 * prompt)), arrival, order)
    request.is_long = is_long
    return request


def make(name: PolicyName, cached_tokens: Callable[[Request], int] = lambda request: 0) -> Policy:
    return make_policy(SchedulerConfig(policy=name, priority_age_seconds=AGE), cached_tokens)


def start(policy: Policy, request: Request, cached: int = 0) -> None:
    """As the planner does it."""
    if not request.preemptions:
        request.cached_tokens = cached
    request.num_known = request.num_planned = len(request.tokens)
    policy.remove(request)


def start_order(policy: Policy, now: float = 0.0) -> list[int]:
    orders = []
    while (request := policy.first(now, True)) is not None:
        start(policy, request)
        orders.append(request.order)
    return orders


class Histories(RuleBasedStateMachine):
    """Arrivals, starts, preemptions and aborts in random order; what waits is what a plain list says."""

    policy_name: PolicyName = "fcfs"

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[int, int] = {}
        self.policy = make(self.policy_name, lambda request: self.cached[request.order])
        self.now = 0.0
        self.arrived = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    @rule(
        prompt=st.integers(1, 2000),
        tenant=st.sampled_from("abc"),
        priority=st.integers(-3, 3),
        ttft=st.none() | st.floats(0.1, 30),
        is_long=st.booleans(),
        cached=st.integers(0, 3),
        count=st.integers(1, 5),
    )
    def arrive(
        self, prompt: int, tenant: str, priority: int, ttft: float | None, is_long: bool, cached: int, count: int
    ) -> None:
        for _ in range(count):
            request = make_request(
                self.arrived,
                arrival=self.now,
                prompt=prompt,
                tenant=tenant,
                priority=priority,
                target=ttft,
                is_long=is_long,
            )
            self.cached[request.order] = min(cached, prompt - 1)
            self.arrived += 1
            self.policy.add(request)
            self.waiting.append(request)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(longs=st.booleans())
    def start_first(self, longs: bool) -> None:
        request = self.policy.first(self.now, longs)
        self.check_first(request, [other for other in self.waiting if longs or not other.is_long])
        if request is not None:
            self.waiting.remove(request)
            self.running.append(request)
            start(self.policy, request, self.cached[request.order])

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def abort_waiting(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.policy.remove(request)
        with pytest.raises(KeyError):
            self.policy.remove(request)

    @rule(data=st.data(), still_long=st.booleans())
    @precondition(lambda self: self.running)
    def preempt(self, data: st.DataObject, still_long: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        request.preemptions += 1
        request.is_long = still_long
        self.policy.add(request)
        self.waiting.append(request)

    @rule(tokens=st.integers(1, 3000))
    def decode(self, tokens: int) -> None:
        for request in self.running:
            request.num_planned += tokens
            self.policy.served(request, tokens)

    @rule()
    @precondition(lambda self: self.running)
    def finish(self) -> None:
        self.running.pop(0)

    def check_first(self, request: Request | None, eligible: list[Request]) -> None:
        """The definition of the policy; here what holds for all of them."""
        assert (request is None) == (not eligible)
        assert request is None or request in eligible
        assert self.policy.first(self.now, True) in self.waiting or not self.waiting

    @invariant()
    def holds_what_waits(self) -> None:
        assert len(self.policy) == len(self.waiting)
        assert {request.order for request in self.policy} == {request.order for request in self.waiting}

    @invariant()
    def running_keys_differ(self) -> None:
        assert len({self.policy.running_key(request) for request in self.running}) == len(self.running)

    def teardown(self) -> None:
        """Everything comes out once, whatever the state was."""
        assert sorted(start_order(self.policy, self.now)) == sorted(request.order for request in self.waiting)
        assert len(self.policy) == 0


class FirstComeHistories(Histories):
    def check_first(self, request: Request | None, eligible: list[Request]) -> None:
        assert request is min(eligible, key=lambda other: other.order, default=None)


class PriorityHistories(Histories):
    policy_name = "priority"

    def check_first(self, request: Request | None, eligible: list[Request]) -> None:
        def key(other: Request) -> tuple[float, int]:
            return (other.arrival + other.priority * AGE, other.order)

        assert request is min(eligible, key=key, default=None)


class DeadlineHistories(Histories):
    policy_name = "deadline"

    def check_first(self, request: Request | None, eligible: list[Request]) -> None:
        def key(other: Request) -> tuple[float, int]:
            return (other.arrival + (AGE if other.ttft_target is None else other.ttft_target), other.order)

        assert request is min(eligible, key=key, default=None)


class LongestPrefixHistories(Histories):
    policy_name = "longest-prefix"

    def check_first(self, request: Request | None, eligible: list[Request]) -> None:
        def key(other: Request) -> tuple[float, ...]:
            if other.preemptions:
                return (0, other.order)
            if self.now - other.arrival >= AGE:
                return (1, other.order)
            return (2, -self.cached[other.order], other.order)

        # Only the oldest are looked at; with fewer of each kind it is exactly the longest prefix of all.
        if len(eligible) <= WINDOW:
            assert request is min(eligible, key=key, default=None)
        else:
            super().check_first(request, eligible)


class FairHistories(Histories):
    policy_name = "fair"

    def check_first(self, request: Request | None, eligible: list[Request]) -> None:
        super().check_first(request, eligible)
        if request is not None:
            returning = [other.order for other in eligible if other.preemptions]
            own = [other.order for other in eligible if other.tenant == request.tenant]
            assert request.order == min(returning or own)


TestFirstComeHistories = FirstComeHistories.TestCase
TestPriorityHistories = PriorityHistories.TestCase
TestDeadlineHistories = DeadlineHistories.TestCase
TestLongestPrefixHistories = LongestPrefixHistories.TestCase
TestFairHistories = FairHistories.TestCase


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_all_names_are_known_and_preempted_requests_come_back_first(name: PolicyName) -> None:
    policy = make(name)
    first, *others = [make_request(order) for order in range(5)]
    for request in (first, *others):
        policy.add(request)
    assert policy.first(0.0, True) is first
    start(policy, first)
    first.preemptions = 1
    policy.add(first)
    assert start_order(policy) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_a_short_request_is_found_behind_many_long_ones(name: PolicyName) -> None:
    policy = make(name)
    for order in range(2 * WINDOW):
        policy.add(make_request(order, is_long=True))
    assert policy.first(0.0, False) is None
    short = make_request(1000)
    policy.add(short)
    assert policy.first(0.0, False) is short


class TestAgeing:
    def test_one_priority_step_is_worth_the_age(self) -> None:
        policy = make("priority")
        policy.add(make_request(0, arrival=0.0, priority=1))
        policy.add(make_request(1, arrival=AGE - 0.01, priority=0))
        policy.add(make_request(2, arrival=AGE + 0.01, priority=0))
        assert start_order(policy, AGE + 1) == [1, 0, 2]

    def test_an_urgent_stream_cannot_starve_anyone(self) -> None:
        """Urgent requests arrive as fast as requests are started; the patient one still starts when its bound is up."""
        policy = make("priority")
        policy.add(make_request(0, priority=5))
        now, order = 0.0, 0
        while True:
            order += 1
            now += 0.25
            policy.add(make_request(order, arrival=now, priority=0))
            request = policy.first(now, True)
            assert request is not None
            start(policy, request)
            if request.order == 0:
                break
            assert now < 5 * AGE
        assert now >= 5 * AGE - 0.25

    def test_a_cached_prefix_overtakes_no_longer_than_the_age(self) -> None:
        policy = make("longest-prefix", lambda request: min(request.order, 1))
        policy.add(make_request(0, arrival=0.0))
        policy.add(make_request(1, arrival=1.0))
        ahead = policy.first(AGE - 0.01, True)
        assert ahead is not None
        assert ahead.order == 1
        assert start_order(policy, AGE) == [0, 1]


class TestLongestPrefix:
    def test_lookups_are_few_and_a_prefix_that_grows_is_noticed(self) -> None:
        cached = dict.fromkeys(range(1000), 0)
        lookups: Counter[int] = Counter()

        def look_up(request: Request) -> int:
            lookups[request.order] += 1
            return cached[request.order]

        policy = make("longest-prefix", look_up)
        for order in range(1000):
            policy.add(make_request(order))
        assert policy.first(0.0, True) is not None
        assert lookups.total() <= WINDOW
        cached[WINDOW - 1] = 5
        for _ in range(WINDOW):
            request = policy.first(0.0, True)
            assert request is not None
            if request.order == WINDOW - 1:
                break
        assert request.order == WINDOW - 1
        assert lookups.total() <= 4 * WINDOW
        assert max(lookups) == WINDOW - 1


class TestFairShares:
    @given(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(1, 3 * QUANTUM)),
            min_size=1,
            max_size=60,
        )
    )
    @settings(max_examples=200)
    def test_backlogged_tenants_differ_by_a_quantum_and_a_prompt(self, requests: list[tuple[str, int]]) -> None:
        """Shreedhar and Varghese, theorem on fairness, while all three have something waiting."""
        policy = make("fair")
        backlog: Counter[str] = Counter()
        for order, (tenant, prompt) in enumerate(requests):
            policy.add(make_request(order, tenant=tenant, prompt=prompt))
            backlog[tenant] += 1
        tenants, largest = sorted(backlog), max(prompt for _, prompt in requests)
        started = dict.fromkeys(tenants, 0)
        while all(backlog[tenant] for tenant in tenants):
            request = policy.first(0.0, True)
            assert request is not None
            start(policy, request)
            backlog[request.tenant] -= 1
            started[request.tenant] += request.num_prompt
            assert max(started.values()) - min(started.values()) <= QUANTUM + largest

    def test_a_flood_of_one_tenant_does_not_delay_another(self) -> None:
        policy = make("fair")
        for order in range(1000):
            policy.add(make_request(order, tenant="flood", prompt=QUANTUM))
        for _ in range(10):
            request = policy.first(0.0, True)
            assert request is not None
            start(policy, request)
        policy.add(make_request(1000, tenant="quiet", prompt=QUANTUM))
        assert 1000 in start_order(policy)[:2]

    def test_outputs_are_paid_for(self) -> None:
        """A tenant that has had 4 quanta of outputs misses 4 turns."""
        policy = make("fair")
        chatty = make_request(0, tenant="chatty", prompt=QUANTUM)
        policy.add(chatty)
        assert policy.first(0.0, True) is chatty
        for order in range(1, 11):
            policy.add(make_request(order, tenant="chatty" if order > 8 else "brief", prompt=QUANTUM))
        start(policy, chatty)
        for _ in range(4 * QUANTUM):
            chatty.num_planned += 1
            policy.served(chatty, 1)
        assert start_order(policy) == [1, 2, 3, 4, 5, 9, 6, 10, 7, 8]

    def test_prompt_chunks_are_not_charged_twice(self) -> None:
        policy = make("fair")
        chunked = make_request(0, tenant="a", prompt=2 * QUANTUM)
        policy.add(chunked)
        policy.add(make_request(1, tenant="a", prompt=QUANTUM))
        policy.add(make_request(2, tenant="b", prompt=QUANTUM))
        policy.add(make_request(3, tenant="b", prompt=QUANTUM))
        policy.add(make_request(4, tenant="b", prompt=QUANTUM))
        assert policy.first(0.0, True) is not None
        order = []
        while (request := policy.first(0.0, True)) is not None:
            start(policy, request)
            policy.served(request, request.num_prompt)
            order.append(request.order)
        assert order == [2, 0, 3, 1, 4]

    def test_cached_tokens_are_free(self) -> None:
        policy = make("fair", lambda request: request.num_prompt - 1 if request.tenant == "cached" else 0)
        for order in range(8):
            tenant = "cached" if order % 2 else "new"
            policy.add(make_request(order, tenant=tenant, prompt=QUANTUM))
        order = []
        while (request := policy.first(0.0, True)) is not None:
            start(policy, request, request.num_prompt - 1 if request.tenant == "cached" else 0)
            order.append(request.order)
        assert order == [0, 1, 3, 5, 7, 2, 4, 6]

    def test_aborted_requests_cost_nothing_and_leaving_hoards_nothing(self) -> None:
        policy = make("fair")
        for order in range(20):
            policy.add(make_request(order, tenant="a", prompt=QUANTUM))
        # Having waited for long with a prompt that never started, b comes back with what everyone begins with.
        big = make_request(20, tenant="b", prompt=10 * QUANTUM)
        policy.add(big)
        for _ in range(8):
            request = policy.first(0.0, True)
            assert request is not None
            assert request.tenant == "a"
            start(policy, request)
        policy.remove(big)
        for order in range(21, 25):
            policy.add(make_request(order, tenant="b", prompt=QUANTUM))
        assert [order >= 21 for order in start_order(policy)[:6]] in ([True, False] * 3, [False, True] * 3)

    def test_tenants_that_went_are_forgotten_once_they_owe_nothing(self) -> None:
        policy = make("fair")
        assert isinstance(policy, DeficitRoundRobin)
        policy.add(make_request(0, tenant="stays", prompt=QUANTUM))
        debts = []
        for order in range(1, 2001):
            policy.add(make_request(10_000 + order, tenant="stays", prompt=QUANTUM))
            visitor = make_request(order, tenant=f"visitor {order}", prompt=QUANTUM)
            policy.add(visitor)
            while (request := policy.first(0.0, True)) is not visitor:
                assert request is not None
                start(policy, request)
            start(policy, visitor)
            visitor.num_planned += 3 * QUANTUM
            policy.served(visitor, 3 * QUANTUM)
            debts.append(policy.num_debtors)
        assert max(debts) <= 8, "each owes three rounds"

    def test_a_debt_is_not_lost_by_going_and_is_worked_off_in_as_many_rounds(self) -> None:
        policy = make("fair")
        for order in range(100, 140):
            policy.add(make_request(order, tenant="ab"[order % 2], prompt=QUANTUM))
        first = make_request(0, tenant="debtor", prompt=QUANTUM)
        policy.add(first)
        while (request := policy.first(0.0, True)) is not first:
            assert request is not None
            start(policy, request)
        start(policy, first)
        first.num_planned += 6 * QUANTUM
        policy.served(first, 6 * QUANTUM)
        for _ in range(4):  # two rounds pass without it
            request = policy.first(0.0, True)
            assert request is not None
            start(policy, request)
        again = make_request(1, tenant="debtor", prompt=QUANTUM)
        policy.add(again)
        # Four rounds of a and b for the rest of its debt, and in the fifth it has its turn.
        assert start_order(policy).index(1) in (8, 9, 10)

    def test_turns_are_few_however_many_tenants_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        turns = 0
        pass_turn = DeficitRoundRobin._pass_turn

        def counted(policy: DeficitRoundRobin) -> None:
            nonlocal turns
            turns += 1
            pass_turn(policy)

        monkeypatch.setattr(DeficitRoundRobin, "_pass_turn", counted)
        policy = make("fair")
        for order in range(2000):
            policy.add(make_request(order, tenant=f"{order % 500}", prompt=QUANTUM))
        assert len(start_order(policy)) == 2000
        assert turns <= 2000
        # One round without a start, then as many as it takes at once.
        for order in range(500):
            policy.add(make_request(order, tenant=f"{order}", prompt=1000 * QUANTUM))
        turns = 0
        assert len(start_order(policy)) == 500
        assert turns <= 3 * 500

    def test_an_idle_engine_forgives(self) -> None:
        """What a tenant used while nobody waited, or before the queue was last empty, is not held against it."""
        policy = make("fair")
        alone = make_request(0, tenant="a", prompt=QUANTUM)
        policy.add(alone)
        assert policy.first(0.0, True) is alone
        start(policy, alone)
        alone.num_planned += 100 * QUANTUM
        policy.served(alone, 100 * QUANTUM)
        other = make_request(100, tenant="b", prompt=QUANTUM)
        policy.add(other)
        policy.served(alone, 100 * QUANTUM)
        assert policy.first(0.0, True) is other
        start(policy, other)
        for order in range(1, 7):
            policy.add(make_request(order, tenant="ba"[order % 2], prompt=QUANTUM))
        assert start_order(policy) == [1, 2, 3, 4, 5, 6]

    def test_long_requests_that_are_held_up_hoard_nothing(self) -> None:
        policy = make("fair")
        for order in range(20):
            policy.add(make_request(order, tenant="long", prompt=4 * QUANTUM, is_long=True))
        for order in range(20, 90):
            policy.add(make_request(order, tenant="short", prompt=QUANTUM))
        for _ in range(50):  # as the planner asks while too many long ones are being computed
            policy.first(0.0, True)
            request = policy.first(0.0, False)
            assert request is not None
            start(policy, request)
        owners = [order >= 20 for order in start_order(policy)]
        assert owners.index(True) <= 2
        assert owners[:25].count(False) in (5, 6, 7)  # four quanta each, against one
