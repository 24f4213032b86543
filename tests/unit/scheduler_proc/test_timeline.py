"""What the core tells of a request's way; every other test of the core checks it too (see timelines and engine)."""

import pytest

from ipc.timing_columns import chunks_of
from scheduler_proc.timeline import MAX_CHUNKS
from tests.unit.scheduler_proc.engine import Engine


def test_a_prompt_in_chunks() -> None:
    engine = Engine(max_step_tokens=8)
    engine.submit(1, list(range(1, 21)), 3, stops=())
    engine.run_to_idle()
    [timings] = engine.timelines.told[1]
    # Each step takes 10 ms, and two are in flight: the third is planned when the first has come back.
    chunks = [(0.001, 0.011, 8), (0.001, 0.021, 8), (0.011, 0.031, 4)]
    assert [pytest.approx(chunk) for chunk in chunks_of(timings)] == chunks
    times = (timings.queued, timings.first_scheduled, timings.first_token, timings.last_token)
    assert times == pytest.approx((0.001, 0.001, 0.031, 0.051))
    assert (timings.steps, timings.preemptions) == (5, 0)


def test_what_waits_is_not_scheduled() -> None:
    engine = Engine(max_seqs=1)
    engine.submit(1, [1, 2, 3], 4, stops=())
    engine.submit(2, [4, 5, 6], 1, stops=())
    engine.run_to_idle()
    [first], [second] = engine.timelines.told[1], engine.timelines.told[2]
    assert second.queued < first.last_token <= second.first_scheduled < second.first_token == second.last_token


def test_a_preempted_request_tells_what_it_computed_again() -> None:
    engine = Engine(num_blocks=28, block_size=4, max_seqs=8)
    for request_id in range(8):
        engine.submit(request_id, [request_id + 1, 2, 3, 4], 40, stops=(), tells_timings=True)
    engine.run_to_idle()
    told = [engine.timelines.told[request_id] for request_id in range(8)]
    assert sum(ends[-1].preemptions for ends in told) == engine.core.planner.num_preemptions > 0
    for ends in told:
        *early, end = ends
        # One before the first token, and one more for each time that it had got going again; it was told no less then.
        assert 1 <= len(early) <= end.preemptions + 1
        assert end.chunk_ends.startswith(early[-1].chunk_ends)
        assert [timings.last_token for timings in early] == [0.0] * len(early)
        assert sum(tokens for _, _, tokens in chunks_of(end)) > 4 or end.preemptions == 0


def test_a_request_that_does_not_ask_is_told_at_its_end_only() -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3], 5, stops=())
    engine.submit(2, [1, 2, 4], 5, stops=(), tells_timings=True)
    engine.run_to_idle()
    assert [len(engine.timelines.told[request_id]) for request_id in (1, 2)] == [1, 2]
    early, end = engine.timelines.told[2]
    assert early.first_token == end.first_token
    assert (early.steps, end.steps) == (1, 5)


def test_chunks_beyond_the_limit_are_one() -> None:
    engine = Engine(max_step_tokens=1, max_seqs=1)
    engine.submit(1, list(range(1, 31)) * 3, 2, stops=())
    engine.run_to_idle()
    [timings] = engine.timelines.told[1]
    chunks = chunks_of(timings)
    assert [tokens for _, _, tokens in chunks] == [1] * (MAX_CHUNKS - 1) + [90 - MAX_CHUNKS + 1]
    assert chunks[-1][1] == timings.first_token
    assert timings.steps == 91


def test_a_loss_of_the_ranks_counts_as_a_preemption() -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3], 6, stops=())
    engine.step()
    engine.step()
    engine.lose_engine()
    engine.recover()
    engine.run_to_idle()
    [timings] = engine.timelines.told[1]
    assert timings.preemptions == 1
    assert [tokens for _, _, tokens in chunks_of(timings)] == [3, 5]
    assert timings.first_token == 0.011


def test_without_measuring_there_are_none_and_everything_else_is_the_same() -> None:
    """Preemptions, stops, aborts and a loss of the ranks included."""
    engines = [Engine(num_blocks=28, max_seqs=6, max_step_tokens=16, measure=measure) for measure in (True, False)]
    for engine in engines:
        for request_id in range(8):
            prompt = [request_id + 1, *range(2, 12)]
            engine.submit(request_id, prompt, 20 + request_id, stops=(), tells_timings=request_id % 2 == 0)
        engine.step()
        engine.abort(3)
        engine.stop(5)
        engine.lose_engine()
        engine.recover()
        engine.run_to_idle()
    measured, plain = engines
    assert measured.core.planner.num_preemptions > 0
    assert plain.sent == measured.sent
    assert plain.outputs == measured.outputs
    assert (len(measured.timelines.told), len(plain.timelines.told)) == (6, 0)
    assert plain.core.window is None
    assert plain.core.stats(1.0, 2.0) == measured.core.stats(1.0, 2.0)
