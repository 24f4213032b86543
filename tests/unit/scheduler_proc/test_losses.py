"""Ranks that die: every request goes on, but not one that kills them each time it runs."""

import pytest

from ipc.codec import unpack_ints
from scheduler_proc.core import MAX_LOSSES
from tests.unit.scheduler_proc.engine import PEER, Engine


def test_a_lost_engine_is_waited_for_and_every_request_goes_on() -> None:
    engine = Engine(max_seqs=4)
    for request_id in range(6):
        engine.submit(request_id, [request_id + 1, 2, 3], 30, stops=())
    for _ in range(7):
        engine.step()
    engine.lose_engine()
    assert not engine.plans
    engine.submit(9, [5, 6], 3, stops=())  # taken meanwhile
    assert not engine.step()
    engine.recover()
    engine.run_to_idle()  # which compares every token
    assert engine.core.counters.recoveries == 1
    assert engine.core.planner.recomputed_tokens > 0
    assert not engine.failures


def test_a_request_during_which_the_ranks_die_again_and_again_is_given_up() -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3], 30, stops=())
    for _ in range(2):
        for _ in range(MAX_LOSSES - 1):
            engine.lose_engine()
            engine.recover()
        assert not engine.failures
        engine.step()  # a token: it was not this request that killed them
    for _ in range(MAX_LOSSES - 1):
        engine.lose_engine()
        engine.recover()
    engine.submit(2, [4, 5], 3, stops=())
    engine.lose_engine()
    assert (engine.failures[1].status, engine.failures[1].code) == (500, "engine_died")
    engine.recover()
    engine.run_to_idle()
    assert len(engine.outputs[2]) == 3


@pytest.mark.parametrize("said", [True, False], ids=["a rank says so", "a rank crashes without a word"])
@pytest.mark.parametrize("outputs", [0, 3], ids=["at once", "in the midst of its output"])
@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_request_that_kills_the_ranks_fails_alone(place: int, outputs: int, said: bool) -> None:
    """As one does whose logits are NaN, or that meets a segmentation fault: no step for it has a result for anybody."""
    engine = Engine(num_blocks=200, max_seqs=16, max_step_tokens=256)
    for number in range(10):
        engine.submit(number, [number + 1, 2, 3, 4], 12, stops=())

    def kills() -> bool:
        request = engine.core.requests.get((PEER, place))
        if request is None or request.num_outputs < outputs or not engine.plans:
            return False
        columns = unpack_ints(engine.plans[0].scheduled)
        return any(row == request.row and sample for row, sample in zip(columns[::4], columns[3::4], strict=True))

    deaths = 0
    while engine.core.requests:
        if kills():
            deaths += 1
            engine.lose_engine(in_step=said)
            engine.recover(after_crash=not said)
        else:
            engine.step()
    assert deaths == MAX_LOSSES
    assert [(number, failed.status, failed.code) for number, failed in engine.failures.items()] == [
        (place, 500, "engine_died")
    ]
    engine.run_to_idle()  # which compares the others' tokens with what they get alone
