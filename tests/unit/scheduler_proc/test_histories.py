"""Random histories of the scheduler core: whatever happens, every request ends once and with its own tokens.

The invariants are checked after every single event (see engine), the KV contents at every step (see fake_worker).
"""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_proc.block_pool import BlockPool
from tests.unit.scheduler_proc.engine import Engine

actions = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(0, 3),  # which family of prompts: members share a prefix
        st.sampled_from([1, 7, 16, 20, 20, 30]),  # prompt length: often the same, so that prompts are equal
        st.integers(1, 20),  # max_tokens
        st.integers(0, 4),  # min_tokens
    ),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("stop"), st.integers(0, 30), st.integers(0, 5)),
    st.tuples(st.just("lose peer")),
)
shapes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(13, 40),  # 13 blocks of 4 hold the longest request (30 + 20 tokens)
        "block_size": st.just(4),
        "max_seqs": st.integers(1, 6),
        "max_step_tokens": st.integers(6, 40),
        "prefill_chunk": st.integers(1, 40),
        "prefix_cache": st.booleans(),
    }
)


def play(shape: dict, history: list[tuple]) -> Engine:
    engine = Engine(**shape)
    count = 0
    for action in history:
        match action:
            case ("submit", family, length, max_tokens, min_tokens):
                prompt = [(family * 7 + i * i) % 49 + 1 for i in range(length)]
                engine.submit(count, prompt, max_tokens, min_tokens=min(min_tokens, max_tokens))
                count += 1
            case ("step", times):
                for _ in range(times):
                    engine.step()
            case ("abort", which) if which < count:
                engine.abort(which)
            case ("stop", which, tokens) if which < count:
                engine.stop(which, tokens)
            case ("lose peer",):
                engine.lose_peer()
    engine.run_to_idle()
    assert engine.worker.max_tokens_seen <= shape["max_step_tokens"]
    return engine


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes, history=st.lists(actions, max_size=40))
def test_every_history_ends_well(shape: dict, history: list[tuple]) -> None:
    play(shape, history)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes, history=st.lists(actions, max_size=60))
def test_ten_thousand_histories_end_well(shape: dict, history: list[tuple]) -> None:
    play(shape, history)


def test_a_broken_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: a release that forgets one block does not get past them."""
    release = BlockPool.release

    def forgetful(self: BlockPool, blocks: Sequence[int], last_step: int | None) -> None:
        release(self, blocks[1:], last_step)

    monkeypatch.setattr(BlockPool, "release", forgetful)
    with pytest.raises(AssertionError, match="lost"):
        play(
            {"num_blocks": 40, "block_size": 4, "max_seqs": 4, "max_step_tokens": 16, "prefix_cache": True},
            [("submit", 0, 20, 10, 0), ("step", 3), ("abort", 0)],
        )
