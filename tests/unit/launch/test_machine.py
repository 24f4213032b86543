"""Facts about the machine, read from a file system laid out for the test as the kernel documents it."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launch.gpus import count_gpus
from launch.machine import look_around

MIB = 1 << 20


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def free_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


def test_without_any_limit_it_is_what_the_system_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_memory(monkeypatch, 123 * MIB)
    machine = look_around(tmp_path)
    assert machine.memory_available == 123 * MIB
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.cpu_features == frozenset()


def test_limits_of_a_version_2_group_and_of_those_above_it(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/box/inner"
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box/inner\n",
            f"{group}/memory.max": "max\n",
            f"{group}/cpu.max": "max 100000\n",
            "sys/fs/cgroup/box/memory.max": f"{512 * MIB}\n",
            "sys/fs/cgroup/box/memory.current": f"{300 * MIB}\n",
            "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {100 * MIB}\n",
            "sys/fs/cgroup/box/cpu.max": "150000 100000\n",
        },
    )
    machine = look_around(root)
    assert machine.memory_available == (512 - 300 + 100) * MIB
    assert machine.cores == 1  # one and a half


def test_limits_of_a_version_1_group_whose_path_is_the_hosts(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{256 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{56 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {6 * MIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    machine = look_around(root)
    assert machine.memory_available == (256 - 56 + 6) * MIB
    assert machine.cores == 1


def test_the_huge_number_that_version_1_writes_for_no_limit_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_memory(monkeypatch, 1 << 64)  # more than that number
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{56 * MIB}\n",
        },
    )
    assert look_around(root).memory_available == 1 << 64


def test_two_threads_of_one_core_count_once(tmp_path: Path) -> None:
    cpus = os.sched_getaffinity(0)
    files = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-99\n" for cpu in cpus}
    machine = look_around(lay_out(tmp_path, files))
    assert machine.cores == 1
    assert machine.core_cpus == (min(cpus),)


def test_one_cpu_of_each_core_socket_by_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = {0: ("0,4", 0), 1: ("1,5", 1), 2: ("2,6", 0), 4: ("0,4", 0), 7: ("3,7", 1)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(topology))
    files = {}
    for cpu, (siblings, socket) in topology.items():
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files |= {f"{folder}/thread_siblings_list": f"{siblings}\n", f"{folder}/physical_package_id": f"{socket}\n"}
    machine = look_around(lay_out(tmp_path, files))
    assert machine.cores == 4
    assert machine.core_cpus == (0, 2, 1, 7)
    monkeypatch.delattr(os, "sched_setaffinity")
    assert look_around(tmp_path).core_cpus == ()


@pytest.mark.parametrize(
    ("cpuinfo", "has_bfloat16"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n", True),
        ("processor\t: 0\nflags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", False),
    ],
)
def test_bfloat16_instructions(tmp_path: Path, cpuinfo: str, has_bfloat16: bool) -> None:
    assert look_around(lay_out(tmp_path, {"proc/cpuinfo": cpuinfo})).has_bfloat16 is has_bfloat16


def test_gpus_are_counted_by_device_nodes_or_by_the_driver_and_can_be_hidden(tmp_path: Path) -> None:
    nodes = lay_out(tmp_path / "a", {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    driver = lay_out(tmp_path / "b", {"proc/driver/nvidia/gpus/0000:01:00.0/information": ""})
    assert count_gpus(nodes, {}) == 2
    assert count_gpus(driver, {}) == 1
    assert count_gpus(nodes, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert count_gpus(nodes, {"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert count_gpus(nodes, {"CUDA_VISIBLE_DEVICES": "1"}) == 2
