"""What the drill of measuring makes of its pairs."""

import itertools

import pytest

from tools.drills.measuring import asked_in, conclusion, order


@pytest.mark.parametrize("pairs", [1, 2, 3, 10, 11])
def test_each_kind_comes_first_as_often(pairs: int) -> None:
    firsts = order(pairs)
    assert len(firsts) == pairs
    assert 0 <= 2 * sum(firsts) - pairs <= 1
    assert firsts == order(pairs)


def test_ten_pairs_do_not_alternate() -> None:
    firsts = order(10)
    assert any(before == after for before, after in itertools.pairwise(firsts))


def test_the_overhead_is_what_is_missing_of_the_ratio() -> None:
    text = conclusion([0.97, 0.99, 0.98, 0.98])
    assert "mean 0.9800" in text
    assert "median 0.9800" in text
    assert "costs 2.00% of the throughput" in text


def test_pairs_that_agree_leave_no_doubt() -> None:
    text = conclusion([1.01] * 10)
    assert "95% interval 1.0100 to 1.0100" in text
    assert "costs -1.00% of the throughput, 95% interval -1.00% to -1.00%" in text


def test_everything_is_asked_for_from_the_first_turn_on() -> None:
    asked = [asked_in(turn) for turn in range(8)]
    assert asked[0] == ["/metrics", "/diagnose"]
    assert [sum(path in turn for turn in asked) for path in ("/metrics", "/diagnose")] == [4, 2]
