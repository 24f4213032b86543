"""Memory of processes by kind of mapping, as Linux accounts for it (man 5 proc_pid_smaps)."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import psutil

_SHARED_MEMORY = ("/dev/shm/", "/memfd:", "/SYSV")
_WEIGHT_FILES = (".gguf", ".safetensors")


class Mapping(Protocol):
    """What is asked of psutil's description of one mapping; sizes in bytes."""

    path: str  # in brackets where there is no file
    pss: int
    anonymous: int
    private_clean: int
    private_dirty: int


class Memory(NamedTuple):
    """Bytes that are resident. Of a page shared by n processes, each has a share of 1/n, except in `private`."""

    anonymous: int  # heap, stacks, arrays, and pages of file mappings that were written to
    code: int  # untouched pages of the interpreter's and libraries' files
    weight_files: int
    shared_memory: int
    private: int  # in no other process: what its end would free

    @property
    def total(self) -> int:
        """Proportional set size (PSS)."""
        return self.anonymous + self.code + self.weight_files + self.shared_memory


def add_up(mappings: Iterable[Mapping]) -> Memory:
    """The sums over all mappings of one process."""
    sums = dict.fromkeys(Memory._fields, 0)
    for mapping in mappings:
        kind = _kind(mapping.path)
        # A private mapping of a file: what was written is this process's own copy.
        own = mapping.anonymous if kind in ("code", "weight_files") else 0
        sums[kind] += mapping.pss - own
        sums["anonymous"] += own
        sums["private"] += mapping.private_clean + mapping.private_dirty
    return Memory(**sums)


def _kind(path: str) -> str:
    if path.startswith(_SHARED_MEMORY):
        return "shared_memory"
    if not path.startswith("/"):
        return "anonymous"
    return "weight_files" if path.removesuffix(" (deleted)").endswith(_WEIGHT_FILES) else "code"


def memory_of(pid: int) -> Memory:
    """psutil.Error when the process is gone or is another user's. Linux only: elsewhere psutil knows no PSS."""
    return add_up(psutil.Process(pid).memory_maps(grouped=False))
