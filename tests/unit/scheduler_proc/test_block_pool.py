"""The block pool against sets of ids."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_proc.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(0)
        self.mine: list[int] = []
        self.copied: dict[int, int] = {}  # block id -> the plan that still copies it
        self.plan = 0

    @initialize(total=st.integers(0, 12))
    def start(self, total: int) -> None:
        self.pool = BlockPool(total)
        self.pool.begin_plan(self.plan)

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        num_free = self.pool.num_free
        if count > num_free:
            with pytest.raises(ValueError, match=f"{count} blocks wanted, {num_free} free"):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        assert len(taken) == count
        assert not set(taken) & (set(self.mine) | set(self.copied))
        self.mine += taken

    @precondition(lambda self: self.mine)
    @rule(data=st.data(), plan=st.none() | st.integers(-2, 3))
    def release(self, data: st.DataObject, plan: int | None) -> None:
        """`plan` is relative to the one being made: before it, this one, or a later one."""
        count = data.draw(st.integers(0, len(self.mine)))
        blocks, self.mine = self.mine[:count], self.mine[count:]
        until = None if plan is None else self.plan + plan
        self.pool.release(blocks, until)
        if until is not None and until >= self.plan:
            self.copied.update(dict.fromkeys(blocks, until))

    @rule(steps=st.integers(1, 2))
    def begin_plan(self, steps: int) -> None:
        self.plan += steps
        self.pool.begin_plan(self.plan)
        self.copied = {block: until for block, until in self.copied.items() if until >= self.plan}

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.mine = []
        self.copied = {}
        self.plan = 0
        self.pool.begin_plan(self.plan)

    @invariant()
    def every_id_is_in_one_place(self) -> None:
        assert sorted(self.pool.in_transit_ids()) == sorted(self.copied)
        assert sorted(self.pool.free_ids() + self.mine + list(self.copied)) == list(range(self.pool.total))
        assert self.pool.num_free == len(self.pool.free_ids())
        assert self.pool.num_in_transit == len(self.copied)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_a_block_being_copied_is_free_in_the_plan_after() -> None:
    pool = BlockPool(2)
    pool.begin_plan(5)
    first, second = pool.allocate(2)
    pool.release([first], 5)
    pool.release([second], None)
    assert pool.free_ids() == [second]
    pool.begin_plan(5)
    assert pool.in_transit_ids() == [first]
    pool.begin_plan(6)
    assert sorted(pool.free_ids()) == [0, 1]


def test_ids_are_handed_out_from_zero() -> None:
    assert BlockPool(3).allocate(2) == [0, 1]


def test_numbering_starts_anew_after_a_reset() -> None:
    pool = BlockPool(1)
    pool.begin_plan(40)
    pool.reset()
    pool.release(pool.allocate(1), 0)
    assert pool.num_in_transit == 1
