"""Small arrays on their way between host and GPU: one copy a step and direction, which nobody waits for.

Host memory for copies that run beside the host's own work is pinned, and there are two pieces of it, used in turn: a
runner has at most two steps on their way (`Runner.launch`). Without a GPU (Triton's interpreter) all of it is plain
memory, and copies are done when they return.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16  # bytes; what Triton's kernels profit from
_LEAST_BYTES = 1 << 14

Array = NDArray[np.generic]


class Upload:
    """One array or several from the host, in one copy, to the same device memory each time.

    Arrays of the same sizes come to lie at the same addresses: with `fixed_bytes`, which are never exceeded, a CUDA
    graph may read them there.
    """

    def __init__(self, device: torch.device, fixed_bytes: int = 0) -> None:
        self._device = device
        self._fixed = bool(fixed_bytes)
        # When each piece of host memory had been read: steps that compute nothing are not waited for otherwise.
        self._read = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else []  # type: ignore[no-untyped-call]
        self._grow(fixed_bytes or _LEAST_BYTES)

    def _grow(self, num_bytes: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Start the copy; the arrays on the device, good until the next `send`."""
        arrays = [np.ascontiguousarray(array) for array in arrays]
        offsets, total = _offsets([array.nbytes for array in arrays])
        if total > len(self._there):
            if self._fixed:
                raise ValueError(f"{total} bytes do not fit into the {len(self._there)} of this upload")
            self._grow(2 * total)
        host = self._host[0]
        self._host.reverse()
        if self._read:
            self._read[0].synchronize()
            self._read.reverse()
        octets = host.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            octets[offset : offset + array.nbytes] = array.view(np.uint8).reshape(-1)
        self._there[:total].copy_(host[:total], non_blocking=True)
        if self._read:
            self._read[-1].record()
        return [
            self._there[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]


class Download:
    """Tensors from the device, and the event that tells when they have arrived."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._grow(_LEAST_BYTES)

    def _grow(self, num_bytes: int) -> None:
        self._host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(2)]

    def start(self, tensors: Sequence[torch.Tensor]) -> "Arriving":
        """Start to copy contiguous tensors, of which each host array is good until the second `start` from here."""
        offsets, total = _offsets([tensor.nbytes for tensor in tensors])
        if total > len(self._host[0]):
            self._grow(2 * total)
        host = self._host[0]
        self._host.reverse()
        found = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            here = host[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            here.copy_(tensor, non_blocking=True)
            found.append(here.numpy())
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Arriving(found, event)


class Arriving:
    """Arrays on their way from the device."""

    def __init__(self, arrays: list[Array], event: torch.cuda.Event | None) -> None:
        self._arrays = arrays
        self._event = event

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Array]:
        if self._event is not None:
            self._event.synchronize()
        return self._arrays


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces of so many bytes begin, and where the last one ends."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += size + -size % _ALIGNMENT
    return offsets, end
