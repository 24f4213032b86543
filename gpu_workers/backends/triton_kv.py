"""The paged KV pool on a GPU, and blocks of it in pinned host memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from gpu_workers.backends.pinned_memory import pinned_zeros

# Copied before the next ones are started: a copy of a block, whose layers lie apart, takes as much device memory again.
_BLOCKS_AT_ONCE = 16

QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, **QUANTIZED}


@dataclass(slots=True, frozen=True)
class GpuKV:
    """Keys and values [2, layers, blocks, G, block size, D]: of one KV head, a block is one piece of memory.

    8-bit ones have a float32 scale [2, layers, blocks, G, block size] each.
    """

    pool: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        kv_dtype: str,
        device: torch.device,
    ) -> "GpuKV":
        shape = (2, num_layers, num_blocks, num_kv_heads, block_size)
        scales = torch.zeros(shape, device=device) if kv_dtype in QUANTIZED else None
        return cls(torch.zeros(*shape, head_dim, dtype=_DTYPES[kv_dtype], device=device), scales)

    @property
    def num_kv_heads(self) -> int:
        return self.pool.shape[3]

    @property
    def block_size(self) -> int:
        return self.pool.shape[4]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Keys, values and their scales of a layer, [blocks, G, block size, D] and [blocks, G, block size]."""
        if self.scales is None:
            return self.pool[0, layer], self.pool[1, layer], None, None
        return self.pool[0, layer], self.pool[1, layer], self.scales[0, layer], self.scales[1, layer]

    def parts(self) -> list[torch.Tensor]:
        """What a block consists of, as bytes [2, layers, blocks, bytes]."""
        return [
            part.view(torch.uint8).flatten(3)
            for part in (self.pool.flatten(3), None if self.scales is None else self.scales.flatten(3))
            if part is not None
        ]


class GpuHostKV:
    """Blocks as bytes [blocks, 2, layers, bytes], pinned, and copies on a stream of their own.

    A copy waits for what was launched before `begin_copies`: forwards that wrote what it reads, or read what it writes.
    """

    def __init__(self, kv: GpuKV, num_blocks: int) -> None:
        on_gpu = kv.pool.device.type == "cuda"
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._launched: torch.cuda.Event | None = None
        zeros = pinned_zeros if on_gpu else partial(torch.zeros, dtype=torch.uint8)
        self._blocks = [zeros((num_blocks, *part.shape[:2], part.shape[3])) for part in kv.parts()]

    def begin_copies(self) -> None:
        """See `Backend.begin_copies`."""
        if self._stream is not None:
            # When a copy's own thread gets to it, the forward that it is to run beside may have been launched, too.
            self._launched = torch.cuda.current_stream().record_event()

    def copy_out(self, kv: GpuKV, pairs: torch.Tensor) -> None:
        """`pairs` [N, 2]: KV block id, host block id. Complete when it returns."""
        for some in self._in_turn(pairs):
            for here, part in zip(self._blocks, kv.parts(), strict=True):
                for block, host_block in some:
                    here[host_block].copy_(part[:, :, block], non_blocking=True)

    def copy_in(self, kv: GpuKV, pairs: torch.Tensor) -> None:
        """`pairs` [N, 2]: host block id, KV block id. Complete when it returns."""
        for some in self._in_turn(pairs):
            for here, part in zip(self._blocks, kv.parts(), strict=True):
                for host_block, block in some:
                    part[:, :, block].copy_(here[host_block], non_blocking=True)

    def _in_turn(self, pairs: torch.Tensor) -> Iterator[list[list[int]]]:
        """A few pairs at a time, to be copied on the copies' stream; the last ones are copied when it ends."""
        with torch.cuda.stream(self._stream):
            if self._stream is not None and self._launched is not None:
                self._stream.wait_event(self._launched)
            for start in range(0, len(pairs), _BLOCKS_AT_ONCE):
                yield pairs[start : start + _BLOCKS_AT_ONCE].tolist()
                if self._stream is not None:
                    self._stream.synchronize()
