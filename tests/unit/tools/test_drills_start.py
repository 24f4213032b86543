"""The start drill: memory as Linux accounts for it, and what is made of it."""

import asyncio
import os
import re
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from config.memory_plan import MemoryPlan
from tools.drills.memory import Memory, add_up, memory_of
from tools.drills.start import Start, _idle_process, median, memory_rows, module_of, total, worker_line


class Mapped(NamedTuple):
    """As `psutil` describes a mapping, in KiB."""

    path: str
    pss: int
    private_clean: int
    private_dirty: int
    anonymous: int

    def in_bytes(self) -> "Mapped":
        return Mapped(self.path, *(size << 10 for size in self[1:]))


MAPPED = (
    Mapped("/usr/bin/python 3.11", 50, 0, 0, 0),
    Mapped("/lib/libx.so (deleted)", 30, 4, 20, 20),
    Mapped("[heap]", 500, 0, 500, 500),
    Mapped("[anon]", 1000, 0, 1000, 1000),
    Mapped("/models/small.gguf", 700, 700, 0, 0),
    Mapped("/memfd:ring", 8, 0, 8, 0),
)
MIB = 1 << 20


def test_mappings_are_added_up_by_kind() -> None:
    memory = add_up(mapped.in_bytes() for mapped in MAPPED)
    assert memory == Memory(
        anonymous=1520 << 10, code=60 << 10, weight_files=700 << 10, shared_memory=8 << 10, private=2232 << 10
    )
    assert memory.total == (50 + 30 + 500 + 1000 + 700 + 8) << 10


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="this system has no smaps_rollup")
def test_the_sums_are_those_of_the_kernel() -> None:
    memory = memory_of(os.getpid())
    text = Path("/proc/self/smaps_rollup").read_text()
    kernel = {name: int(size) << 10 for name, size in re.findall(r"(\w+): +(\d+) kB", text)}
    assert memory.total == pytest.approx(kernel["Pss"], rel=0.05)
    assert memory.anonymous == pytest.approx(kernel["Pss_Anon"], rel=0.05)
    assert memory.private == pytest.approx(kernel["Private_Clean"] + kernel["Private_Dirty"], rel=0.05)


def test_a_process_that_is_gone_has_no_memory() -> None:
    with pytest.raises(psutil.NoSuchProcess):
        memory_of(1 << 30)


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["python", "-m", "launch", "--model", "x"], "launch"),
        (["python", "-m", "launch.child", "spec", "3", "4", "gpu_workers.main"], "gpu_workers.main"),
        (["python", "-m", "tokenizer_proc.template_child"], "tokenizer_proc.template_child"),
        (["/usr/bin/g++", "-c", "x.cpp"], "g++"),
        (["python", "-m"], "python"),
        ([], "?"),
    ],
)
def test_processes_are_named_by_their_modules(command: list[str], module: str) -> None:
    assert module_of(command) == module


def test_columns_are_added_and_medians_taken_each_on_its_own() -> None:
    assert median([Start(1, 5, 6), Start(3, 4, 9), Start(2, 6, 7)]) == Start(2, 5, 7)
    memories = [Memory(1 * MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB), Memory(MIB, MIB, MIB, MIB, MIB)]
    assert total(memories) == Memory(2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB, 6 * MIB)
    assert memory_rows([("a", memories[0])]) == [("a", ["10.0", "1.0", "2.0", "3.0", "4.0", "5.0"])]


def test_the_worker_is_compared_with_weights_and_pool() -> None:
    plan = MemoryPlan(
        tp=1,
        weights=80 * MIB,
        activations=0,
        runtime_total=0,
        kv_bytes_per_token=MIB // 16,
        block_size=16,
        num_blocks=20,
        memory_available=1 << 33,
    )
    idle = Memory(100 * MIB, 60 * MIB, 0, 0, 0)
    workers = [Memory(190 * MIB, 0, 0, 0, 0), Memory(220 * MIB, 0, 0, 0, 0)]
    line = worker_line(workers, idle, plan)
    assert "packed weights 80.0 MiB + KV pool 20.0 MiB = 100 MiB" in line
    assert "120 MiB anonymous" in line
    assert line.endswith("ratio 1.200")


def test_the_idle_process_has_the_workers_libraries() -> None:
    def look(pid: int) -> tuple[Memory, str]:
        return memory_of(pid), Path(f"/proc/{pid}/maps").read_text()

    async def measure() -> tuple[Memory, str]:
        async with _idle_process(1) as pid:
            return look(pid)

    memory, maps = asyncio.run(measure())
    assert "libtorch" in maps
    assert memory.anonymous > MIB
