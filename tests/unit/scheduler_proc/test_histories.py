"""Random histories of the scheduler core: whatever happens, every request ends once and with its own tokens.

The invariants are checked after every single event (see engine), the KV contents at every step (see fake_worker). Every
history has a number: `play(random.Random(number))` is the same history each time, so a failing one replays from it:

    python -m tests.unit.scheduler_proc.test_histories 4711
"""

import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc.codec import pack_ints
from ipc.engine_messages import StepResult
from scheduler_proc.block_pool import BlockPool
from scheduler_proc.core import ProtocolError
from scheduler_proc.events import StepDone
from tests.unit.scheduler_proc.engine import Engine

LONGEST = 30 + 20  # prompt and output
POLICIES = ["fcfs", "priority", "longest-prefix", "fair", "deadline"]


def random_shape(rng: random.Random) -> dict[str, Any]:
    """Settings of an engine, in which the longest request of a history fits."""
    block_size = rng.choice([1, 2, 4, 4, 4, 8])
    needed = -(-LONGEST // block_size)
    max_seqs = rng.randint(1, 6)
    max_step_tokens = rng.randint(max(6, max_seqs), 40)
    swap = rng.random() < 0.3
    prefix_cache = swap or rng.random() < 0.8
    return {
        "num_blocks": rng.randint(needed, 3 * needed),
        "num_host_blocks": rng.choice([0, 3, 10, 60]) if prefix_cache else 0,
        "block_size": block_size,
        "max_seqs": max_seqs,
        "max_step_tokens": max_step_tokens,
        "prefill_chunk": rng.randint(1, max_step_tokens),
        "prefix_cache": prefix_cache,
        "policy": rng.choice(POLICIES),
        "priority_age_seconds": rng.choice([0.01, 0.1, 30.0]),
        "kv_shortage": "swap" if swap else rng.choice(["wait", "recompute"]),
        "eviction": rng.choice(["lru", "lfu", "fifo"]),
        "prefer": rng.choice(["mixed", "mixed", "prefill", "decode"]),
        "batching": rng.choice(["continuous", "continuous", "continuous", "dynamic"]),
        "batch_wait_ms": rng.choice([0.0, 0.0, 50.0]),
        "max_itl_ms": rng.choice([None, None, 12.0, 40.0]),
        "pinned_share": rng.choice([0.0, 0.25, 0.9]),
        "long_prompt_tokens": rng.choice([8, 18, 1000]),
        "max_long_prefills": rng.randint(1, 3),
        "long_step_share": rng.choice([0.1, 0.5, 1.0]),
        "long_pool_share": rng.choice([0.1, 0.5, 1.0]),
        "hang_timeout": rng.choice([math.inf, 0.5]),
    }


def submit_random(engine: Engine, rng: random.Random, number: int) -> None:
    """A request; members of a family share a prefix, and some have equal prompts."""
    family = rng.randint(0, 3)
    length = rng.choice([1, 7, 16, 20, 20, 30])
    prompt = [(family * 7 + i * i) % 49 + 1 for i in range(length)]
    if rng.random() < 0.2:
        earlier = rng.choice(list(engine.submitted)) if engine.submitted else None
        if earlier is not None and earlier in engine.outputs:  # the next turn of a conversation
            prompt = (engine.submitted[earlier][0] + engine.outputs[earlier])[:30]
    max_tokens = rng.randint(1, 20)
    engine.submit(
        number,
        prompt,
        max_tokens,
        min_tokens=min(rng.choice([0, 0, 0, 4]), max_tokens),
        namespace=rng.choice(["", "", "a"]),
        tenant=rng.choice(["x", "y", "z"]),
        priority=rng.randint(-2, 2),
        ttft_target_ms=rng.choice([None, None, 1.0, 50.0, 10_000.0]),
        cache_pin_seconds=rng.choice([0.0, 0.0, 0.0, 0.05, 100.0]),
        tells_timings=rng.random() < 0.3,
    )


def play(rng: random.Random, actions: int = 50) -> Engine:
    """One history, to its end."""
    shape = random_shape(rng)
    engine = Engine(**shape)
    slow = rng.choice([1.0, 1.0, 3.0])
    engine.seconds = lambda plan: (0.002 + 0.001 * len(plan.scheduled) / 16) * slow
    count = 0
    burst = rng.choice([1, 1, 4])
    for _ in range(actions):
        kind = rng.choices(
            ["submit", "step", "abort", "stop", "peer", "lose", "recover", "wrong", "wait"],
            [30, 45, 6, 4, 1, 2, 6, 2, 3],
        )[0]
        if kind == "submit":
            for _ in range(rng.randint(1, burst)):
                submit_random(engine, rng, count)
                count += 1
        elif kind == "step":
            for _ in range(rng.randint(1, 6)):
                engine.step()
        elif kind == "abort" and count:
            engine.abort(rng.randrange(count))
        elif kind == "stop" and count:
            engine.stop(rng.randrange(count))
        elif kind == "peer":
            engine.lose_peer()
        elif kind == "lose" and engine.core.engine_ready:
            engine.lose_engine()
        elif kind == "recover" and not engine.core.engine_ready:
            engine.recover()
        elif kind == "wrong" and engine.plans:
            wrong_result(engine, rng)
        elif kind == "wait":
            engine.wait(rng.choice([0.01, 0.1, 1.0]))
            if engine.given_up:  # as the shell does it
                engine.given_up.clear()
                engine.lose_engine()
    if not engine.core.engine_ready:
        engine.recover()
    engine.run_to_idle()
    assert engine.worker.max_tokens_seen <= shape["max_step_tokens"]
    return engine


def wrong_result(engine: Engine, rng: random.Random) -> None:
    """A result that was delivered twice, out of order, or with a token too many is an error and changes nothing."""
    number = engine.plans[0].step
    wrong = rng.choice([number - 1, number + 1, number])
    result = StepResult(wrong, pack_ints([1] * 100))
    with pytest.raises(ProtocolError):
        engine.core.handle(StepDone(engine.time, result))


def test_histories_end_well() -> None:
    for number in range(150):
        try:
            play(random.Random(number))
        except Exception as error:
            raise AssertionError(f"history {number} failed: {error}") from error


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(rng=st.randoms(use_true_random=False), actions=st.integers(0, 40))
def test_histories_that_can_be_shrunk_end_well(rng: random.Random, actions: int) -> None:
    """The same, drawn by hypothesis, which looks for the shortest one that fails."""
    play(rng, actions)


@pytest.mark.slow
def test_ten_thousand_histories_end_well() -> None:
    start = random.SystemRandom().randrange(1 << 40)
    print(f"histories {start} to {start + 9_999}")
    for number in range(start, start + 10_000):
        try:
            play(random.Random(number), actions=70)
        except Exception as error:
            raise AssertionError(f"history {number} (70 actions) failed: {error}") from error


def test_a_broken_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: a release that forgets one block does not get past them."""
    release = BlockPool.release

    def forgetful(self: BlockPool, blocks: Sequence[int], until_plan: int | None) -> None:
        release(self, blocks[1:], until_plan)

    monkeypatch.setattr(BlockPool, "release", forgetful)
    with pytest.raises(AssertionError, match="lost"):
        play(random.Random(1))


if __name__ == "__main__":
    play(random.Random(int(sys.argv[1])), *(int(argument) for argument in sys.argv[2:]))
