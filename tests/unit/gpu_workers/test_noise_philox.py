"""The counter-based noise against the known answers of Random123 and against uniformity."""

import numpy as np
import pytest

from gpu_workers.noise import philox4x32, uniform

# Lines "philox4x32 10" of tests/kat_vectors in Random123 (D. E. Shaw Research): counter, key, answer.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]


def _words() -> np.ndarray:
    return np.array([[int(word, 16) for word in line.split()] for line in KNOWN_ANSWERS], dtype=np.uint64).T


def test_known_answers_of_random123():
    words = _words()
    np.testing.assert_array_equal(philox4x32(words[:4], words[4:6]), words[6:])


def test_a_block_does_not_depend_on_the_others():
    for line in _words().T[:, :, None]:
        np.testing.assert_array_equal(philox4x32(line[:4], line[4:6]), line[6:])


def test_uniform_uses_seed_as_key_and_index_as_counter():
    seed, index = 0x299F31D0A4093822, 5 << 32 | 7
    block = philox4x32(
        np.array([[7], [5], [0], [0]], dtype=np.uint64),
        np.array([[0xA4093822], [0x299F31D0]], dtype=np.uint64),
    )[:, 0]
    expected = ((int(block[0]) << 32 | int(block[1])) >> 12) + 0.5
    drawn = uniform(np.array([seed], dtype=np.uint64), np.array([index]))
    assert drawn[0] * 2.0**52 == expected


def test_uniform_is_uniform_and_never_reaches_the_ends():
    n = 100_000
    drawn = uniform(np.full(n, 2**64 - 1, dtype=np.uint64), np.arange(n))
    assert drawn.min() > 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
    chi_square = float(((counts - n / 100) ** 2 / (n / 100)).sum())
    assert 50 < chi_square < 148.2  # 99 degrees of freedom: exceeded with probability 0.001


@pytest.mark.parametrize("index", [0, 1, 511])
def test_neighbouring_seeds_are_unrelated(index):
    n = 20_000
    drawn = uniform(np.arange(n, dtype=np.uint64), np.full(n, index))
    correlation = float(np.corrcoef(drawn[:-1], drawn[1:])[0, 1])
    assert abs(correlation) < 4 / n**0.5
