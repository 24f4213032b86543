"""Words that are one token each, found by asking a tokenizer that is known."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.loadgen.words import CANDIDATES, WordsError, single_token_words


def find(hard: frozenset[str], added: int, candidates: Sequence[str] = CANDIDATES) -> tuple[list[str], int, int]:
    """Words, tokens added, and how often the tokenizer was asked."""
    asked = 0

    async def count(text: str) -> int:
        nonlocal asked
        asked += 1
        return added + sum(3 if word in hard else 1 for word in text.split(" "))

    words, found = asyncio.run(single_token_words(count, candidates))
    return words, found, asked


@given(hard=st.frozensets(st.sampled_from(CANDIDATES[1:]), max_size=40), added=st.integers(0, 50))
def test_all_words_of_one_token_are_found_and_no_other(hard: frozenset[str], added: int) -> None:
    words, found, asked = find(hard, added)
    assert words == [word for word in CANDIDATES if word not in hard]
    assert found == added
    assert asked <= 3 + 2 * 8 * len(hard)  # two questions at each level of a binary search


def test_a_tokenizer_without_such_words_is_told() -> None:
    with pytest.raises(WordsError, match="only 1 words"):
        find(frozenset(CANDIDATES[1:]), 0)
    with pytest.raises(WordsError, match="splits even 'the'"):
        find(frozenset(CANDIDATES), 0)


def test_candidates_are_different_words() -> None:
    assert len(set(CANDIDATES)) == len(CANDIDATES) > 100
