"""The paged KV pool of the native CPU kernels, and the host tier beside it: blocks as plain bytes."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(slots=True, frozen=True)
class NativeKV:
    """Bytes [blocks, layers, bytes of a block]; what lies in a block is the kernels' business (`attention.h`).

    All layers of a block lie together, so that the pool takes its memory from the system little by little: with layers
    outside, a new page would be needed in each of them at once, which took 0.3 s of a step every 170 blocks.
    """

    pool: Bytes
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_layers(self) -> int:
        return int(self.pool.shape[1])


@dataclass(slots=True, frozen=True)
class NativeHostKV:
    """Bytes [host blocks, layers, bytes of a block]."""

    blocks: Bytes

    def copy_out(self, kv: NativeKV, pairs: torch.Tensor) -> None:
        """`pairs` [N, 2]: KV block id, host block id. numpy's copies release the GIL."""
        for block, host_block in pairs.tolist():
            np.copyto(self.blocks[host_block], kv.pool[block])

    def copy_in(self, kv: NativeKV, pairs: torch.Tensor) -> None:
        """`pairs` [N, 2]: host block id, KV block id."""
        for host_block, block in pairs.tolist():
            np.copyto(kv.pool[block], self.blocks[host_block])


def zeroed_bytes(*shape: int) -> Bytes:
    """Zeros that start at a multiple of 64, in pages that the system provides when they are first written.

    Zeros, not whatever is there: places of a block that nobody has written weigh 0, and 0 times a NaN would be NaN.
    """
    size = int(np.prod(shape))
    memory = np.zeros(size + 63, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].reshape(shape)
