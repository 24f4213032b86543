"""Device backends by name; one is imported only when it is asked for."""

import logging
import os
from collections.abc import Callable, Sequence

import torch

from gpu_workers.backend import Backend
from ipc.control import StartError

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ON_CPU = ("float32", "bfloat16")  # what the CPU backends compute in


def make_backend(
    device: str,
    dtype: str,
    threads: int | None,
    deterministic: bool,
    kernels: str = "auto",
    quantized: bool = True,
    kv_dtype: str = "float32",
    progress: Callable[[str], None] | None = None,
    cpus: Sequence[int] = (),
) -> Backend:
    """The backend for a resolved `device` and `dtype` ("float32" or "bfloat16").

    `threads` is the number of compute threads of this rank (None: torch's choice). With `deterministic`, a row's
    result does not depend on the other rows of its batch. `kernels` on a CPU: "native" (compiled), "torch", or "auto",
    which takes torch with a warning where the native ones can't be compiled; or "triton", those of a GPU under Triton's
    interpreter. `quantized`: quantized weights are multiplied as they are, if the kernels can. `kv_dtype` ("float32",
    "float16", "bfloat16", "int8", on a GPU "fp8") is that of the KV cache; torch's kernels have `dtype` there.
    `progress` is told in words what takes long. `cpus`: one for each of the native kernels' threads, to which all are
    bound but the first, the caller's. StartError when there is no such backend.
    """
    supported = _ON_CPU if device == "cpu" and kernels != "triton" else tuple(_DTYPES)
    if dtype not in supported:
        raise StartError(f"--dtype {dtype} is not supported on {device}; choose one of: {', '.join(supported)}.")
    if device == "cuda" or kernels == "triton":
        return _triton_backend(device, _DTYPES[dtype], threads, deterministic, quantized, kv_dtype)
    if device != "cpu":
        raise StartError(f"--device {device} has no backend here; available: cpu, cuda.")
    if kernels != "torch":
        from gpu_workers.backends.native_cpu import NativeCpuBackend
        from kernels.cpu.build import BuildError, IsaError

        try:
            threads = threads or torch.get_num_threads()
            return NativeCpuBackend(_DTYPES[dtype], threads, quantized, kv_dtype, progress, cpus)
        except BuildError as error:
            if kernels == "native":
                raise StartError(f"--kernels native: {error}") from error
            if isinstance(error, IsaError):
                raise StartError(str(error)) from error
            if kv_dtype == "int8":  # nobody has it without asking for it
                raise StartError(f"--kv-dtype int8 needs compiled kernels, which can't be had: {error}") from error
            log.warning(
                "plain torch operations instead of the CPU kernels, many times slower, and keys and values as %s, not "
                "%s: %s",
                dtype,
                kv_dtype,
                error,
            )
    from gpu_workers.backends.torch_cpu import create

    return create(_DTYPES[dtype], threads, deterministic)


def _triton_backend(
    device: str, dtype: torch.dtype, threads: int | None, deterministic: bool, quantized: bool, kv_dtype: str
) -> Backend:
    if threads is not None:
        torch.set_num_threads(threads)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    elif not torch.cuda.is_available():
        raise StartError("--device cuda: torch finds no GPU here")
    try:
        from gpu_workers.backends.triton_gpu import TritonBackend
    except ImportError as error:
        raise StartError(f"--kernels triton: {error}. Install it: pip install triton") from error
    from kernels.gpu.launch import INTERPRETED

    if INTERPRETED and device == "cuda":
        raise StartError("--device cuda: the variable TRITON_INTERPRET is set, with which kernels run on the CPU")
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return TritonBackend(place, dtype, deterministic, quantized, kv_dtype)
