"""Host memory that a GPU reads and writes by itself: pinned, and no more of it than was asked for.

torch's own allocator of pinned memory rounds up to a power of 2: 9 GiB would take 16. So this is ordinary memory, which
the CUDA (or HIP) runtime pins afterwards.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ipc.control import StartError


def pinned_zeros(shape: Sequence[int], runtime: Any = None) -> torch.Tensor:
    """Bytes of this shape, pinned for as long as they exist. `runtime`: by default that of torch.

    StartError when the system does not let so much memory be pinned.
    """
    # The system provides these pages, and clears them, when they are pinned.
    array = np.zeros(shape, dtype=np.uint8)
    size = math.prod(shape)
    if size:
        runtime = runtime or torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = array.ctypes.data
        error = int(runtime.cudaHostRegister(address, size, 0))
        if error:
            raise StartError(
                f"--host-kv-memory: {size / (1 << 30):.1f} GiB of memory can't be pinned (CUDA error {error}); ask for "
                "less, or raise the limits of this container or user (ulimit -l)"
            )
        weakref.finalize(array, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(array)
