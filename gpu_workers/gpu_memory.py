"""What a rank's start takes of its GPU's memory, measured, and said where it is not enough."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from config.bytesize import format_size
from ipc.control import StartError

# What errors that are not of torch's own class say: those of the driver, which keeps graphs and kernels, and of cuBLAS.
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class GpuMemory:
    """Adds up by purpose. `free` gives the bytes that are free on the device, by default the current CUDA device.

    Not what torch holds: graphs, contexts and libraries take memory of their own.
    """

    def __init__(
        self,
        allowed: int,
        free: Callable[[], int] = lambda: torch.cuda.mem_get_info()[0],
    ) -> None:
        self._allowed = allowed
        self._free = free
        self._taken: dict[str, int] = {}

    @contextmanager
    def taking(self, purpose: str) -> Iterator[None]:
        """What is taken inside is for `purpose`; StartError where the device has no more."""
        before = self._free()
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in _OUT_OF_MEMORY):
                raise
            taken = [*(f"{name} took {format_size(size)}" for name, size in self._taken.items())]
            told = f" ({', '.join(taken)})" if taken else ""
            raise StartError(
                f"The GPU ran out of memory for {purpose}, with {format_size(self._free())} free{told}; the engine "
                f"planned with {format_size(self._allowed)}. Another program may have taken some since: look with "
                "nvidia-smi. Or give the engine less: --gpu-memory-share, or --kv-memory for the KV cache alone."
            ) from error
        self._taken[purpose] = before - self._free()

    def report(self) -> str:
        """One line for the log."""
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in self._taken.items())
        return f"GPU memory taken: {parts}; {format_size(self._free())} are free"
