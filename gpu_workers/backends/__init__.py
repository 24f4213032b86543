"""Device backends by name; one is imported only when it is asked for."""

from importlib import import_module
from typing import Protocol, cast

import torch

from gpu_workers.backend import Backend
from ipc.control import StartError

# device -> module with a function `create(dtype, threads, deterministic) -> Backend`
_BACKENDS = {"cpu": "gpu_workers.backends.torch_cpu"}

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Module(Protocol):
    def create(self, dtype: torch.dtype, threads: int | None, deterministic: bool) -> Backend: ...


def make_backend(device: str, dtype: str, threads: int | None, deterministic: bool) -> Backend:
    """The backend for a resolved `device` and `dtype` ("float32" or "bfloat16").

    `threads` is the number of compute threads of this rank (None: torch's choice). With `deterministic`, a row's result
    does not depend on the other rows of its batch. StartError when there is no such backend.
    """
    if device not in _BACKENDS:
        raise StartError(f"--device {device} has no backend here; available: {', '.join(sorted(_BACKENDS))}.")
    if dtype not in _DTYPES:
        raise StartError(f"--dtype {dtype} is not supported on {device}; choose one of: {', '.join(_DTYPES)}.")
    module = cast(_Module, import_module(_BACKENDS[device]))
    return module.create(_DTYPES[dtype], threads, deterministic)
