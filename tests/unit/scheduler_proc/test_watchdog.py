"""A step that takes far too long: when the ranks are given up, and that its requests go on with the next ones."""

import pytest

from ipc.engine_messages import StepPlan
from scheduler_proc.cost_model import CostModel
from scheduler_proc.events import Tick
from tests.unit.scheduler_proc.engine import Engine

TIMEOUT = 2.0


def known(seconds: float) -> CostModel:
    """A model that expects so much of every step."""
    return CostModel.from_coefficients((seconds, 0.0, 0.0, 0.0, 0.0))


def busy_engine(cost_model: CostModel | None) -> Engine:
    engine = Engine(hang_timeout=TIMEOUT, cost_model=cost_model)
    for request_id in range(3):
        engine.submit(request_id, [request_id + 1, 2, 3, 4, 5], 12, stops=())
    return engine


def tick(engine: Engine, time: float) -> None:
    engine.time = time
    engine.handle(Tick(time))


@pytest.mark.parametrize(
    ("cost_model", "seconds"),
    [(known(0.01), TIMEOUT), (known(1.0), 5.0), (None, 10 * TIMEOUT)],
    ids=["short step", "long step", "nothing known yet"],
)
def test_the_ranks_are_given_up_once_when_a_step_takes_too_long(cost_model: CostModel | None, seconds: float) -> None:
    engine = busy_engine(cost_model)
    engine.step()
    began = engine.time
    assert engine.wake_at == began + seconds
    tick(engine, began + seconds - 0.001)
    assert not engine.given_up
    assert engine.wake_at == began + seconds
    tick(engine, began + seconds)
    tick(engine, began + 10 * seconds)
    assert [(given_up.step, given_up.seconds) for given_up in engine.given_up] == [(1, seconds)]
    assert engine.wake_at is None


def test_requests_of_ranks_that_were_given_up_go_on_with_the_next_ones() -> None:
    engine = busy_engine(known(0.01))
    for _ in range(4):
        engine.step()
    tick(engine, engine.time + TIMEOUT)
    assert len(engine.given_up) == 1
    engine.lose_engine()
    assert engine.wake_at is None, "nothing is in flight, however long it takes"
    engine.time += 100 * TIMEOUT
    engine.recover()
    engine.run_to_idle()  # which compares every token
    assert len(engine.given_up) == 1
    assert engine.core.counters.recoveries == 1


def test_every_step_has_its_own_time() -> None:
    engine = busy_engine(known(0.01))

    def seconds(plan: StepPlan) -> float:
        return 0.9 * TIMEOUT

    engine.seconds = seconds
    engine.run_to_idle()
    assert engine.time > 5 * TIMEOUT
    assert not engine.given_up


def test_a_scheduler_that_was_held_up_itself_gives_the_step_its_time_again() -> None:
    engine = busy_engine(known(0.01))
    late = engine.time + 60 * TIMEOUT
    tick(engine, late)
    assert not engine.given_up
    assert engine.wake_at == late + TIMEOUT
    tick(engine, late + TIMEOUT)
    assert len(engine.given_up) == 1
