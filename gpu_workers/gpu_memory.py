"""What a rank's start takes of its GPU's memory, measured, and said where it is not enough."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from config.bytesize import format_size
from ipc.control import StartError


class GpuMemory:
    """Adds up by purpose. `reserved` and `free` give bytes: held by torch's allocator, and free on the device.

    The default ones are those of the current CUDA device.
    """

    def __init__(
        self,
        allowed: int,
        reserved: Callable[[], int] = torch.cuda.memory_reserved,
        free: Callable[[], int] = lambda: torch.cuda.mem_get_info()[0],
    ) -> None:
        self._allowed = allowed
        self._reserved = reserved
        self._free = free
        self._taken: dict[str, int] = {}

    @contextmanager
    def taking(self, purpose: str) -> Iterator[None]:
        """What is taken inside is for `purpose`; StartError where the device has no more."""
        before = self._reserved()
        try:
            yield
        except torch.OutOfMemoryError as error:
            taken = [*(f"{name} took {format_size(size)}" for name, size in self._taken.items())]
            told = f" ({', '.join(taken)})" if taken else ""
            raise StartError(
                f"The GPU ran out of memory for {purpose}, with {format_size(self._free())} free{told}; the engine "
                f"planned with {format_size(self._allowed)}. Another program may have taken some since: look with "
                "nvidia-smi. Or give the engine less: --gpu-memory-share, or --kv-memory for the KV cache alone."
            ) from error
        self._taken[purpose] = self._reserved() - before

    def report(self) -> str:
        """One line for the log."""
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in self._taken.items())
        return f"GPU memory taken: {parts}; {format_size(self._free())} are free"
