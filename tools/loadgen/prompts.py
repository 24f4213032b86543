"""Prompts of exact length whose sharing is real: token i of block h is a function of h and i alone.

A prompt that shares with nobody is one block, whose number is the request's. Everything also depends on a seed, so that
one run does not find its prompts in the prefix cache that another has left.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tools.loadgen.messages import Item

_Words = npt.NDArray[np.uint64]


def mixed(values: _Words) -> _Words:
    """Each 64-bit number scattered over all of them, one to one: the finaliser of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _numbers(values: Sequence[int]) -> _Words:
    return np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], dtype=np.uint64)


class Prompts:
    """Makes the prompts of one run.

    `token_range`: lowest token id, and the one behind the highest. `words`: each is one token wherever it stands, the
    first one also at the beginning of a text.
    """

    def __init__(self, seed: int, token_range: tuple[int, int], words: Sequence[str]) -> None:
        self._low, high = token_range
        self._count = np.uint64(high - self._low)
        self._words = words
        # Numbers of blocks from the trace and numbers of requests are apart.
        self._shared, self._single = mixed(_numbers([2 * seed + 1, 2 * seed + 2]))

    def token_ids(self, item: Item) -> list[int]:
        """`item.input_length` ids."""
        ids: list[int] = (self._low + (self._draws(item) % self._count).astype(np.int64)).tolist()
        return ids

    def text(self, item: Item) -> str:
        """Words that make `item.input_length` tokens; the first is the same in all prompts."""
        chosen = (self._draws(item) % np.uint64(len(self._words))).tolist()
        chosen[0] = 0
        return " ".join([self._words[index] for index in chosen])

    def _draws(self, item: Item) -> _Words:
        if item.blocks is None:
            keys, size = _numbers([item.index]) ^ self._single, item.input_length
        else:
            keys, size = _numbers(item.blocks) ^ self._shared, item.block_size
        step = np.uint64(0x9E3779B97F4A7C15)
        values = mixed(keys)[:, None] + step * np.arange(1, size + 1, dtype=np.uint64)
        return mixed(values.ravel()[: item.input_length])
