"""The cache study against brute force, and the order that theory demands."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulate.cache_study import belady_hits, study, tree_hits
from tools.simulate.traces import TraceRequest, infinite_cache_walk, read_trace

POLICIES = ("lru", "lfu", "fifo")


def trace_of(prompts: list[list[int]]) -> list[TraceRequest]:
    return [
        TraceRequest(0.0, b"".join(token.to_bytes(4, "little") for token in prompt), len(prompt), 1)
        for prompt in prompts
    ]


def numbers_of(prompts: list[list[int]]) -> list[list[int]]:
    return [numbers for _, numbers in infinite_cache_walk(trace_of(prompts), 1)]


def best_possible(prompts: list[list[int]], capacity: int) -> int:
    """Most hits of any cache whatever, by trying all: a hit needs the block and all before it in the prompt."""
    sequence = [(number, depth) for numbers in prompts for depth, number in enumerate(numbers)]

    @cache
    def best(index: int, held: frozenset[int], unbroken: bool) -> int:
        if index == len(sequence):
            return 0
        block, depth = sequence[index]
        unbroken = (unbroken or depth == 0) and block in held
        if block in held:
            return unbroken + best(index + 1, held, unbroken)
        if len(held) < capacity:
            return best(index + 1, held | {block}, False)
        return max(best(index + 1, (held | {block}) - {victim}, False) for victim in held | {block})

    return best(0, frozenset(), True)


PROMPTS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 4))
def test_belady_is_the_best_of_all_caches(prompts: list[list[int]], capacity: int) -> None:
    numbers = numbers_of(prompts)
    assert belady_hits(numbers, capacity) == best_possible(numbers, capacity)


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=30),
    capacity=st.integers(1, 30),
    policy=st.sampled_from(POLICIES),
)
def test_no_policy_beats_belady_and_belady_not_the_infinite_cache(
    prompts: list[list[int]], capacity: int, policy: str
) -> None:
    numbers = numbers_of(prompts)
    infinite = sum(hits for hits, _ in infinite_cache_walk(trace_of(prompts), 1))
    assert tree_hits(policy, numbers, capacity) <= belady_hits(numbers, capacity) <= infinite
    assert belady_hits(numbers, 10_000) == tree_hits(policy, numbers, 10_000) == infinite


def test_the_policies_differ_where_they_should() -> None:
    """Single-block prompts, room for two, worked out by hand. A: used often at first; B, C, D: passing by."""
    a, b, c, d = [1], [2], [3], [4]
    scan = numbers_of([a, a, a, b, c, d, a])  # only LFU still has A at the end
    assert [tree_hits(policy, scan, 2) for policy in POLICIES] == [2, 3, 2]
    recent = numbers_of([a, b, a, c, a])  # LRU and LFU keep A over B, FIFO does not
    assert [tree_hits(policy, recent, 2) for policy in POLICIES] == [2, 2, 1]


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    numbers = numbers_of([[1, 2, 3, 4, 5], [1, 2, 9]])
    for policy in POLICIES:
        assert tree_hits(policy, numbers, 2) == 2


def test_a_study_takes_a_tenth_of_the_blocks_by_default() -> None:
    prompts = [[index, index, 7, 7] for index in range(1, 21)] * 2
    result = study(trace_of(prompts), 2, None)
    assert (result.unique_blocks, result.capacity) == (40, 4)
    assert (result.accesses, result.prompt_tokens) == (80, 160)
    assert result.infinite == 40
    assert result.belady >= max(result.policies.values())
    assert set(result.policies) == set(POLICIES)


def test_the_mooncake_trace_shows_what_is_known_of_it(shared_dir: Path) -> None:
    trace = read_trace(shared_dir / "traces" / "mooncake_conversation_div16.jsonl")
    result = study(trace, 16, None)
    assert result.infinite * 16 / result.prompt_tokens == pytest.approx(0.32, abs=0.005)
    assert max(result.policies.values()) <= result.belady <= result.infinite
    ample = study(trace, 16, result.unique_blocks)
    assert set(ample.policies.values()) == {ample.belady} == {ample.infinite}
