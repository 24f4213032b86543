"""KV blocks kept in host memory beside the pool of the CPU backend.

Copied block by block with numpy: its copies release the GIL and stay in the thread that asks for them, while torch's
would start a second team of OpenMP threads, against the one of the forward that runs meanwhile. A gather of many blocks
in one call (`index_select`, `index_copy_`) is no faster: measured, it is several times slower.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.backends.torch_attention import PagedKV

Bytes = NDArray[np.uint8]


@dataclass(slots=True, frozen=True)
class HostKV:
    """Bytes [blocks, 2 (K and V), layers, G, block size x D]: here, a block is one piece of memory."""

    blocks: Bytes

    @classmethod
    def allocate(cls, kv: PagedKV, num_blocks: int) -> "HostKV":
        """Room for `num_blocks` blocks of `kv`, in pages that the system provides when they are first written."""
        num_layers, num_kv_heads, _, width = kv.k.shape
        shape = (num_blocks, 2, num_layers, num_kv_heads, width * kv.k.element_size())
        return cls(np.zeros(shape, dtype=np.uint8))

    def copy_out(self, kv: PagedKV, pairs: torch.Tensor) -> None:
        """`pairs` [N, 2]: KV block id, host block id."""
        pools = _as_bytes(kv)
        for block, host_block in pairs.tolist():
            for kept, pool in zip(self.blocks[host_block], pools, strict=True):
                np.copyto(kept, pool[:, :, block])

    def copy_in(self, kv: PagedKV, pairs: torch.Tensor) -> None:
        """`pairs` [N, 2]: host block id, KV block id."""
        pools = _as_bytes(kv)
        for host_block, block in pairs.tolist():
            for kept, pool in zip(self.blocks[host_block], pools, strict=True):
                np.copyto(pool[:, :, block], kept)


def _as_bytes(kv: PagedKV) -> tuple[Bytes, Bytes]:
    return kv.k.view(torch.uint8).numpy(), kv.v.view(torch.uint8).numpy()
