"""What this machine offers: cores, memory, CPU features and GPUs, within the limits of the container it may be.

Control groups are read in both versions (Linux kernel documentation: cgroup-v2.rst, cgroup-v1/memory.rst,
scheduler/sched-bwc.rst). Paths below `root`, so that tests can lay out a machine of their own.
"""

import math
import os
from pathlib import Path

import psutil

from config.machine import Machine

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number just below 2**63


def look_around(root: Path = Path("/")) -> Machine:
    """The facts that `config.resolve` decides by."""
    available = psutil.virtual_memory().available
    cpus = _core_cpus(root)
    cores = float(len(cpus))
    for limit, used in _memory_limits(root):
        available = min(available, max(0, limit - used))
    for quota in _cpu_quotas(root):
        cores = min(cores, quota)
    return Machine(
        cores=max(1, math.floor(cores)),
        memory_available=available,
        cpu_features=_cpu_features(root),
        core_cpus=cpus if hasattr(os, "sched_setaffinity") else (),
    )


def _read(path: Path) -> str:
    """The file's text, or "" where this kernel or container has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _core_cpus(root: Path) -> tuple[int, ...]:
    """One of the CPUs this process may run on for each of their cores, those of one socket after each other.

    Where the system does not say which CPUs are threads of one core, each counts as a core.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    topology = {cpu: root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in sorted(allowed)}
    siblings = {cpu: _read(folder / "thread_siblings_list") for cpu, folder in topology.items()}
    first = {text or str(cpu): cpu for cpu, text in reversed(siblings.items())}
    return tuple(sorted(first.values(), key=lambda cpu: (_number(topology[cpu] / "physical_package_id") or 0, cpu)))


def _cpu_features(root: Path) -> frozenset[str]:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, Arm
            return frozenset(value.split())
    return frozenset()


def _group_folders(root: Path, controller: str) -> tuple[list[Path], bool]:
    """(this process's control group and all above it, whether they are of version 2) for one controller."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controller in controllers.split(","):
            base, version2 = root / "sys/fs/cgroup" / controller, False
        elif controllers == "" and not (root / "sys/fs/cgroup" / controller).exists():
            base, version2 = root / "sys/fs/cgroup", True
        else:
            continue
        # Inside a container the path may be the host's, which is not visible: the mount's root is then our own group.
        parts = Path(group).parts[1:]
        return [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)], version2
    return [], False


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) in bytes of each group that has a limit; page cache that can be dropped is not counted as used."""
    folders, version2 = _group_folders(root, "memory")
    names = ("memory.max", "memory.current") if version2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    found = []
    for folder in folders:
        limit, used = (_number(folder / name) for name in names)
        if limit is None or limit >= _UNLIMITED:
            continue
        droppable = 0
        for line in _read(folder / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == ("inactive_file" if version2 else "total_inactive_file"):
                droppable = int(value)
        found.append((limit, max(0, (used or 0) - droppable)))
    return found


def _cpu_quotas(root: Path) -> list[float]:
    """CPUs' worth of time that each group with a quota may use."""
    folders, version2 = _group_folders(root, "cpu")
    found = []
    for folder in folders:
        if version2:
            quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        else:
            quota = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            found.append(int(quota) / int(period))
    return found
