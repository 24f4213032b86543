"""The paged KV pool on a GPU, and blocks of it in pinned host memory."""

from dataclasses import dataclass

import torch

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

    A copy waits for all that was started on the device before it: forwards that wrote what it reads among them.
    """

    def __init__(self, kv: GpuKV, num_blocks: int) -> None:
        pinned = kv.pool.device.type == "cuda"
        self._stream = torch.cuda.Stream() if pinned else None  # type: ignore[no-untyped-call]
        self._main = torch.cuda.current_stream() if pinned else None
        self._blocks = [
            torch.zeros(num_blocks, *part.shape[:2], part.shape[3], dtype=torch.uint8, pin_memory=pinned)
            for part in kv.parts()
        ]

    def copy_out(self, kv: GpuKV, pairs: torch.Tensor) -> None:
        """`pairs` [N, 2]: KV block id, host block id. Complete when it returns."""
        with torch.cuda.stream(self._stream):
            self._wait_for_forwards()
            for start in range(0, len(pairs), _BLOCKS_AT_ONCE):
                some = pairs[start : start + _BLOCKS_AT_ONCE]
                for here, part in zip(self._blocks, kv.parts(), strict=True):
                    for block, host_block in some.tolist():
                        here[host_block].copy_(part[:, :, block], non_blocking=True)
                self._finish()

    def copy_in(self, kv: GpuKV, pairs: torch.Tensor) -> None:
        """`pairs` [N, 2]: host block id, KV block id. Complete when it returns."""
        with torch.cuda.stream(self._stream):
            self._wait_for_forwards()
            for start in range(0, len(pairs), _BLOCKS_AT_ONCE):
                some = pairs[start : start + _BLOCKS_AT_ONCE]
                for here, part in zip(self._blocks, kv.parts(), strict=True):
                    for host_block, block in some.tolist():
                        part[:, :, block].copy_(here[host_block], non_blocking=True)
                self._finish()

    def _wait_for_forwards(self) -> None:
        if self._stream is not None and self._main is not None:
            self._stream.wait_stream(self._main)

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
