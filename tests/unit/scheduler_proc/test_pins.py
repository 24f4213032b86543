"""Pinned prefixes: how long they are kept, for how much they count, and when they give way."""

from scheduler_proc.events import Tick
from tests.unit.scheduler_proc.engine import Engine


def test_a_pinned_prefix_outlives_pressure_until_it_expires() -> None:
    engine = Engine(num_blocks=40, block_size=4, pinned_share=0.5, max_step_tokens=64)
    prompt = [1 + i * i % 40 for i in range(33)]
    engine.submit(1, prompt, 1, stops=(), cache_pin_seconds=10.0)
    engine.run_to_idle()
    for request_id in range(2, 12):
        engine.submit(request_id, [request_id] * 90, 2, stops=())
        engine.run_to_idle()
    engine.submit(20, prompt, 1, stops=())
    engine.run_to_idle()
    assert engine.cached[20] == 32
    engine.time += 11.0
    for request_id in range(22, 32):
        engine.submit(request_id, [request_id - 10] * 90, 2, stops=())
        engine.run_to_idle()
    engine.submit(40, prompt, 1, stops=())
    engine.run_to_idle()
    assert engine.cached[40] == 0
    assert engine.core.kv.pins.num_blocks == 0


def test_pins_give_way_to_a_request_that_needs_the_whole_pool() -> None:
    engine = Engine(num_blocks=20, block_size=4, pinned_share=0.9, max_step_tokens=64)
    engine.submit(1, [1 + i * i % 40 for i in range(40)], 1, stops=(), cache_pin_seconds=1000.0)
    engine.run_to_idle()
    engine.submit(2, [2] * 60, 20, stops=())
    engine.run_to_idle()
    assert len(engine.outputs[2]) == 20


def test_blocks_that_pins_share_are_counted_once() -> None:
    engine = Engine(num_blocks=40, block_size=4, pinned_share=0.5, max_step_tokens=64)
    prefix = [1 + i * i % 40 for i in range(40)]
    for request_id in range(3):  # 10 blocks in common and two each: 16 of the 20 that may be pinned
        prompt = [*prefix, *[request_id + 1] * 9]
        engine.submit(request_id, prompt, 1, stops=(), cache_pin_seconds=10.0 + request_id)
        engine.run_to_idle()
        assert engine.core.stats(0.0, 0.0).pinned_blocks == 12 + 2 * request_id
    for left in (14, 12, 0):  # each expires alone, and with the last one what they shared
        assert engine.wake_at is not None
        engine.handle(Tick(engine.wake_at))
        assert engine.core.stats(0.0, 0.0).pinned_blocks == left


def test_pins_of_an_idle_engine_expire_in_time() -> None:
    engine = Engine(num_blocks=40, block_size=4, pinned_share=0.5, max_step_tokens=64)
    engine.submit(1, list(range(1, 34)), 1, stops=(), cache_pin_seconds=10.0)
    pinned_at = engine.time
    engine.run_to_idle()
    assert engine.core.stats(0.0, 0.0).pinned_blocks == 8
    assert engine.wake_at == pinned_at + 10.0
    engine.time = engine.wake_at
    engine.handle(Tick(engine.time))
    assert engine.core.stats(0.0, 0.0).pinned_blocks == 0
    assert engine.wake_at is None
    assert engine.core.kv.tree.num_locked_blocks == 0
