"""The pinned host tier takes what was asked for; the runtime that pins it is a stand-in here."""

import pytest

from gpu_workers.backends.pinned_memory import pinned_zeros
from ipc.control import StartError


class Runtime:
    """Knows which memory is pinned."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("shape", [(9, 2, 3, 1000), (1,), (4097,), (0, 2, 3, 8)])
def test_no_byte_more_is_pinned_than_was_asked_for(shape: tuple[int, ...]) -> None:
    runtime = Runtime()
    blocks = pinned_zeros(shape, runtime)
    assert blocks.shape == shape
    assert not blocks.any()
    assert runtime.pinned == ({blocks.data_ptr(): blocks.nbytes} if blocks.nbytes else {})
    part = blocks[:1]
    del blocks
    assert len(runtime.pinned) == (part.nbytes > 0), "a part of it is still in use"
    del part
    assert runtime.pinned == {}


def test_memory_that_cannot_be_pinned() -> None:
    with pytest.raises(StartError, match=r"--host-kv-memory: 0\.5 GiB of memory can't be pinned \(CUDA error 2\)"):
        pinned_zeros((2, 1 << 28), Runtime(error=2))
