"""What a start took of the GPU's memory is told, and where it is not enough, what was taken for what."""

import pytest
import torch

from gpu_workers.gpu_memory import GpuMemory
from ipc.control import StartError

GIB = 1 << 30


class Device:
    """100 GiB of memory, of which `held` are taken."""

    held = 0

    def memory(self, allowed: int = 90 * GIB) -> GpuMemory:
        return GpuMemory(allowed, free=lambda: 100 * GIB - self.held)


def test_what_was_taken_is_told_by_purpose() -> None:
    device = Device()
    memory = device.memory()
    for purpose, size in (("weights", 16), ("the KV cache", 60), ("CUDA graphs", 1)):
        with memory.taking(purpose):
            device.held += size * GIB
    assert memory.report() == (
        "GPU memory taken: weights 16.0 GiB, the KV cache 60.0 GiB, CUDA graphs 1.00 GiB; 23.0 GiB are free"
    )


def test_a_lack_of_memory_is_a_start_error_that_says_what_to_do() -> None:
    device = Device()
    memory = device.memory()
    with memory.taking("weights"):
        device.held = 16 * GIB
    with pytest.raises(StartError) as raised, memory.taking("the KV cache"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    text = str(raised.value)
    assert text.startswith("The GPU ran out of memory for the KV cache, with 84.0 GiB free (weights took 16.0 GiB)")
    assert "planned with 90.0 GiB" in text
    assert "--gpu-memory-share" in text
    assert "CUDA out of memory" not in text


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_lack_of_memory_is_known_by_what_drivers_and_libraries_say(text: str) -> None:
    with pytest.raises(StartError, match="out of memory for CUDA graphs"), Device().memory().taking("CUDA graphs"):
        raise RuntimeError(text)


@pytest.mark.parametrize("error", [ValueError("no such tensor"), RuntimeError("out of resource: shared memory")])
def test_other_errors_are_not_explained_away(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), Device().memory().taking("weights"):
        raise error
