"""The loop detector against a brute-force oracle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_proc.loops import MAX_PERIOD, MIN_COVERED, LoopDetector


def ends_in_loop(tokens: list[int], repeats: int) -> bool:
    """The definition, word for word."""
    for period in range(1, MAX_PERIOD + 1):
        covered = max(period * repeats, MIN_COVERED)
        if len(tokens) < covered:
            continue
        tail = tokens[-covered:]
        sequence = tail[:period]
        if all(token == sequence[index % period] for index, token in enumerate(tail)):
            return True
    return False


def verdicts(tokens: list[int], repeats: int) -> list[bool]:
    detector = LoopDetector(repeats)
    return [detector.take(token) for token in tokens]


@st.composite
def outputs(draw: st.DrawFn) -> list[int]:
    """Free text and sequences that repeat, sometimes broken, in a small vocabulary so that near-loops are common."""
    vocabulary = draw(st.integers(1, 4))
    token = st.integers(0, vocabulary)
    tokens: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        piece = draw(st.lists(token, min_size=1, max_size=70))
        tokens += piece * draw(st.integers(1, max(1, 150 // len(piece))))
        tokens += draw(st.lists(token, max_size=3))
    return tokens


@given(outputs(), st.integers(2, 12))
def test_agrees_with_the_definition_at_every_token(tokens: list[int], repeats: int) -> None:
    assert verdicts(tokens, repeats) == [ends_in_loop(tokens[: end + 1], repeats) for end in range(len(tokens))]


@pytest.mark.parametrize(
    ("period", "repeats", "first"), [(1, 3, 32), (5, 3, 32), (11, 3, 33), (64, 2, 128), (10, 4, 40)]
)
def test_a_pure_loop_is_found_at_once_and_not_before(period: int, repeats: int, first: int) -> None:
    text = list(range(1000, 1100))  # shares no token with the loop
    found = verdicts(text + list(range(period)) * 40, repeats)
    assert found.index(True) == len(text) + first - 1
    assert all(found[len(text) + first - 1 :])


def test_a_period_above_the_limit_is_no_loop() -> None:
    assert not any(verdicts(list(range(MAX_PERIOD + 1)) * 20, 2))


def test_counting_and_short_runs_are_no_loops() -> None:
    counting = [token for number in range(100) for token in (1, 10 + number, 2)]
    assert not any(verdicts(counting, 2))
    assert not any(verdicts(([7] * (MIN_COVERED - 1) + [8, 9]), 2))


@pytest.mark.parametrize("repeats", [-1, 0, 1])
def test_fewer_than_two_repeats_are_refused(repeats: int) -> None:
    with pytest.raises(ValueError, match="repeats"):
        LoopDetector(repeats)
