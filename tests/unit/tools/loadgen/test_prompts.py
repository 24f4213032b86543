"""Prompts: exact lengths, real sharing, nothing shared by accident."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.loadgen.messages import Item
from tools.loadgen.prompts import Prompts, mixed

RANGE = (100, 30_100)


def block_item(blocks: list[int], size: int, length: int, index: int = 0) -> Item:
    return Item(index, 0.0, length, 1, blocks, size)


def test_numbers_are_scattered_as_splitmix64_does() -> None:
    """The first outputs of SplitMix64 with seed 1234567, from Vigna's reference implementation."""
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + (at + 1) * golden) % 2**64 for at in range(5)]
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert mixed(np.array(states, dtype=np.uint64)).tolist() == expected


@given(
    first=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5),
    second=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5),
    size=st.integers(8, 20),
    cut=st.integers(0, 7),
)
def test_two_prompts_share_exactly_the_blocks_that_they_share(
    first: list[int], second: list[int], size: int, cut: int
) -> None:
    prompts = Prompts(3, RANGE, ())
    one, two = (
        prompts.token_ids(block_item(blocks, size, len(blocks) * size - cut, index))
        for index, blocks in enumerate((first, second))
    )
    assert len(one) == len(first) * size - cut
    assert all(RANGE[0] <= token < RANGE[1] for token in one)
    for at, (left, right) in enumerate(zip(first, second, strict=False)):
        part = slice(at * size, (at + 1) * size)
        shortest = min(len(one[part]), len(two[part]))
        if left % 2**64 == right % 2**64:
            assert one[part][:shortest] == two[part][:shortest]
        else:
            assert one[part] != two[part]


def test_a_block_is_the_same_wherever_it_stands_and_however_long_the_prompt() -> None:
    prompts = Prompts(3, RANGE, ())
    alone = prompts.token_ids(block_item([9], 16, 16))
    assert prompts.token_ids(block_item([1, 2, 9], 16, 48, index=5))[32:] == alone
    assert prompts.token_ids(block_item([9], 16, 5)) == alone[:5]


def test_prompts_without_blocks_share_nothing_and_seeds_change_all() -> None:
    prompts = Prompts(3, RANGE, ())
    found = [tuple(prompts.token_ids(Item(index, 0.0, 20))[:4]) for index in range(500)]
    found += [tuple(prompts.token_ids(block_item([index], 20, 20))[:4]) for index in range(500)]
    found += [tuple(Prompts(4, RANGE, ()).token_ids(Item(index, 0.0, 20))[:4]) for index in range(500)]
    assert len(set(found)) == 1500


@pytest.mark.parametrize("length", [1, 2, 33])
def test_texts_have_so_many_words_and_share_as_token_ids_do(length: int) -> None:
    words = ("the", *(f"w{number}" for number in range(50)))
    prompts = Prompts(3, RANGE, words)
    first = prompts.text(block_item([7, 8], 32, length)).split(" ")
    second = prompts.text(block_item([7, 9], 32, length)).split(" ")
    assert len(first) == length
    assert set(first) <= set(words)
    assert first[0] == "the"
    assert first[:32] == second[:32]
