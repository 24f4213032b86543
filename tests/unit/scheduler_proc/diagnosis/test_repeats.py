"""How much of a prompt begins as an earlier one did."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_proc.diagnosis import repeats
from scheduler_proc.diagnosis.repeats import Repeats

RUN = 8  # tokens: four blocks of two


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), max_size=12))
def test_it_is_what_comparing_with_all_earlier_prompts_says(prompts: list[list[int]]) -> None:
    found = Repeats(block_size=2)
    for number, prompt in enumerate(prompts):
        longest = max((_shared(prompt, earlier) for earlier in prompts[:number]), default=0)
        assert found.take(array("i", prompt), "") == min(longest, len(prompt) - 1)


def _shared(prompt: list[int], earlier: list[int]) -> int:
    """Equal tokens at the start of both, in whole runs of each."""
    runs = 0
    while (end := (runs + 1) * RUN) <= min(len(prompt), len(earlier)) and prompt[:end] == earlier[:end]:
        runs += 1
    return runs * RUN


def test_namespaces_share_nothing() -> None:
    found = Repeats(block_size=2)
    prompt = array("i", range(20))
    assert [found.take(prompt, name) for name in ("a", "b", "a")] == [0, 0, 16]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_MAX_KNOWN", 2)
    found = Repeats(block_size=2)
    first, second = array("i", range(17)), array("i", range(100, 117))
    assert [found.take(prompt, "") for prompt in (first, first, second, first)] == [0, 16, 0, 0]
