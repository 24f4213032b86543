"""Counter-based random numbers: the noise of an output token depends on its request's seed and its index, nothing else.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the tests hold
it against the known answers of the authors' Random123 library. A preempted or recovered request, or one verified after
speculation, draws the same numbers again, because there is no state to restore.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)  # of words 0 and 2
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # steps of the two key words
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 of N blocks: [4, N] counter and [2, N] key words, all below 2^32, give [4, N] words."""
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _ROUNDS * _WEYL) & _LOW:
        product = (_MULTIPLIERS * even)[::-1]
        even, odd = (product >> _32) ^ odd ^ round_key, product & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: NDArray[np.uint64], output_index: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) for each pair of a 64-bit seed and an output index, both [N].

    Multiples of 2^-53: the 52 upper bits of two words, plus one half so that neither end is reached.
    """
    index = output_index.astype(np.uint64)
    zeros = np.zeros_like(index)
    counter = np.stack((index & _LOW, index >> _32, zeros, zeros))
    words = philox4x32(counter, np.stack((seeds & _LOW, seeds >> _32)))
    bits = ((words[0] << _32) | words[1]) >> np.uint64(12)
    uniforms: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return uniforms
