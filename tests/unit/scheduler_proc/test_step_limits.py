"""What the core says kept more out of a step, and where its time without one went."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.engine_messages import StepResult
from ipc.stats_messages import STEP_TOKEN_BOUNDS
from scheduler_proc.cost_model import CostModel, StepShape
from scheduler_proc.counters import Counters
from scheduler_proc.events import Tick
from tests.unit.scheduler_proc.engine import Engine


def learned() -> CostModel:
    """Steps cost 1 ms, and 1 ms for each prompt token and each row."""
    cost = CostModel()
    for prefill in range(0, 64, 4):
        for decodes in range(0, 8, 2):
            cost.observe(StepShape(prefill, 0.0, decodes, 0), 0.001 * (1 + prefill + decodes))
    return cost


def loaded(requests: int, prompt: int, **settings: Any) -> Engine:
    """An engine that was given so many different prompts while it was idle."""
    engine = Engine(**settings)
    for number in range(requests):
        engine.submit(number, [number + 1] * prompt, 40, stops=())
    return engine


@pytest.mark.parametrize(
    ("limit", "requests", "prompt", "settings"),
    [
        ("nothing", 2, 8, {}),
        ("max_seqs", 3, 8, {"max_seqs": 2}),
        ("max_step_tokens", 2, 60, {}),
        ("max_step_tokens", 6, 20, {}),
        ("prefill_chunk", 1, 30, {"prefill_chunk": 8}),
        ("kv_blocks", 4, 20, {"num_blocks": 16, "kv_shortage": "wait"}),
        ("kv_blocks", 4, 20, {"num_blocks": 16}),
        ("long_prompts", 3, 30, {"long_prompt_tokens": 8, "max_long_prefills": 1, "prefill_chunk": 8}),
        ("max_itl_ms", 4, 60, {"max_itl_ms": 20.0, "cost_model": learned()}),
        ("prefer", 4, 60, {"prefer": "decode"}),
        ("prefer", 4, 60, {"prefer": "prefill"}),
    ],
)
def test_a_step_says_what_limited_it(limit: str, requests: int, prompt: int, settings: dict[str, Any]) -> None:
    engine = loaded(requests, prompt, **settings)
    for _ in range(12):
        engine.step()
    limits = engine.core.counters.limits
    assert limit in limits, limits
    engine.run_to_idle()


@pytest.mark.parametrize("kv_shortage", ["wait", "recompute"])
def test_where_there_is_room_for_all_nothing_limits(kv_shortage: str) -> None:
    engine = loaded(4, 8, num_blocks=256, kv_shortage=kv_shortage)
    engine.run_to_idle()
    counters = engine.core.counters
    assert set(counters.limits) == {"nothing"}
    assert counters.limits["nothing"] == len(engine.sent)


def test_each_step_is_counted_once_by_its_tokens() -> None:
    engine = loaded(5, 17, max_step_tokens=16)
    engine.run_to_idle()
    counters = engine.core.counters
    assert sum(counters.limits.values()) == sum(counters.step_tokens) == len(engine.sent)
    upper = sum(count * bound for count, bound in zip(counters.step_tokens, STEP_TOKEN_BOUNDS, strict=False))
    assert counters.step_tokens[3:] == [0] * (len(counters.step_tokens) - 3)
    assert upper / 16 <= counters.computed_tokens <= upper


def test_time_without_a_step_is_told_apart_by_whether_somebody_waited() -> None:
    engine = Engine(batch_wait_ms=500.0)  # an idle engine waits for a second request
    engine.time = 3.0
    engine.submit(1, [5] * 4, 2, stops=())  # at 3.001
    assert engine.core.stats(3.101, 0.0).starved_seconds == pytest.approx(0.1)
    assert engine.core.stats(3.101, 0.0).empty_seconds == pytest.approx(3.001)
    engine.run_to_idle()
    ended = engine.time
    engine.wait(2.0)
    stats = engine.core.stats(engine.time, 0.0)
    assert stats.starved_seconds == pytest.approx(0.5)
    assert stats.empty_seconds == pytest.approx(3.001 + engine.time - ended)
    engine.handle(Tick(engine.time))
    assert engine.core.stats(engine.time, 0.0).empty_seconds == pytest.approx(stats.empty_seconds)


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans(), st.booleans()), max_size=30))
@settings(max_examples=60, deadline=None)
def test_idle_times_add_up_to_the_time_in_those_states(spans: list[tuple[float, bool, bool]]) -> None:
    counters, now, empty, starved = Counters(), 5.0, 0.0, 0.0
    counters.pass_time(now, idle=True, has_requests=False)
    for seconds, idle, has_requests in spans:
        now += seconds
        empty += seconds if idle and not has_requests else 0.0
        starved += seconds if idle and has_requests else 0.0
        counters.pass_time(now, idle=idle, has_requests=has_requests)
    assert (counters.empty_seconds, counters.starved_seconds) == (pytest.approx(empty), pytest.approx(starved))


def test_a_steps_parts_are_summed() -> None:
    counters = Counters()
    for _ in range(2):
        counters.count_step(StepResult(1, b"", (), 1, 20, 300, 4000, score_us=50_000), 3, 0)
    parts = (counters.prepare_us, counters.forward_us, counters.sample_us, counters.between_us, counters.score_us)
    assert parts == (2, 40, 600, 8000, 100_000)
    assert counters.device_busy_us == 100_642
