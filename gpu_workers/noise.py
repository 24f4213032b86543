"""Counter-based random numbers: the noise of an output token depends on its request's seed and its index, nothing else.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the tests hold
it against the known answers of the authors' Random123 library. A preempted or recovered request, or one verified after
speculation, draws the same numbers again, because there is no state to restore.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 of N blocks: [N, 4] counter and [N, 2] key words, all below 2^32, give [N, 4] words."""
    c0, c1, c2, c3 = (counter[:, i] for i in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for turn in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        round_key_0 = (k0 + np.uint64(turn * _WEYL_0)) & _LOW
        round_key_1 = (k1 + np.uint64(turn * _WEYL_1)) & _LOW
        c0, c2 = (product_1 >> _32) ^ c1 ^ round_key_0, (product_0 >> _32) ^ c3 ^ round_key_1
        c1, c3 = product_1 & _LOW, product_0 & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform(seeds: NDArray[np.uint64], output_index: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) for each pair of a 64-bit seed and an output index, both [N].

    Multiples of 2^-53: the 52 upper bits of two words, plus one half so that neither end is reached.
    """
    index = output_index.astype(np.uint64)
    zeros = np.zeros_like(index)
    counter = np.stack((index & _LOW, index >> _32, zeros, zeros), axis=1)
    key = np.stack((seeds & _LOW, seeds >> _32), axis=1)
    words = philox4x32(counter, key)
    bits = ((words[:, 0] << _32) | words[:, 1]) >> np.uint64(12)
    uniforms: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return uniforms
