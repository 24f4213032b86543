"""Memory of processes by kind of mapping, as Linux accounts for it (man 5 proc_pid_smaps)."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# Address range, permissions, offset, device, inode, path.
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S{4}) [0-9a-f]+ \S+ (\d+)\s*(.*)")
_FIELD = re.compile(r"(\w+):\s+(\d+) kB")
_SHARED_MEMORY = ("/dev/shm/", "/memfd:", "/SYSV")
_WEIGHT_FILES = (".gguf", ".safetensors")


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


def parse_smaps(lines: Iterable[str]) -> Memory:
    """From the lines of /proc/PID/smaps."""
    sums = dict.fromkeys(Memory._fields, 0)
    kind = "anonymous"
    for line in lines:
        mapping = _MAPPING.match(line)
        if mapping:
            kind = _kind(int(mapping[2]), mapping[3])
            continue
        field = _FIELD.match(line)
        if not field:
            continue
        name, size = field[1], int(field[2]) << 10
        if name == "Pss":
            sums[kind] += size
        elif name == "Anonymous" and kind in ("code", "weight_files"):
            # A private mapping of a file: what was written is this process's own copy.
            sums[kind] -= size
            sums["anonymous"] += size
        elif name in ("Private_Clean", "Private_Dirty"):
            sums["private"] += size
    return Memory(**sums)


def _kind(inode: int, path: str) -> str:
    if path.startswith(_SHARED_MEMORY):
        return "shared_memory"
    if not inode or not path.startswith("/"):
        return "anonymous"
    return "weight_files" if path.removesuffix(" (deleted)").endswith(_WEIGHT_FILES) else "code"


def memory_of(pid: int) -> Memory:
    """OSError when the process is gone, is another user's, or this system has no /proc."""
    with Path(f"/proc/{pid}/smaps").open() as file:
        return parse_smaps(file)
