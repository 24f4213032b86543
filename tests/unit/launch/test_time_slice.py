"""Short time slices, against what the kernel says of itself."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from launch import time_slice

T = TypeVar("T")


def told() -> int | None:
    """Nanoseconds of this thread's slice as /proc says; None where it says nothing."""
    file = Path(f"/proc/self/task/{threading.get_native_id()}/sched")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split(":")[1]) for line in lines if line.startswith("se.slice")), None)


def in_a_thread(work: Callable[[], T]) -> T:
    """What it changes of its thread ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_thread_and_those_it_starts_get_the_slice_and_keep_their_nice() -> None:
    def work() -> tuple[float | None, int | None, int | None, int]:
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, 3)
        assert time_slice.ask_for(3e-4)
        return time_slice.granted(), told(), in_a_thread(told), os.getpriority(os.PRIO_PROCESS, me)

    if time_slice.granted() is None:
        pytest.skip("this system has no call for it")
    granted, mine, inherited, nice = in_a_thread(work)
    assert nice == 3
    if not granted or mine is None:
        pytest.skip("this kernel takes the number and does nothing with it (before 6.12), or does not tell")
    assert (granted, mine, inherited) == (pytest.approx(3e-4), 300_000, 300_000)


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slice.platform, "machine", lambda: "riscv64")
    assert not time_slice.ask_for(1e-4)
    assert time_slice.granted() is None


def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slice.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(time_slice, "_CALLS", {"x86_64": (1 << 20, 1 << 20)})  # no such call
    assert not time_slice.ask_for(1e-4)
    assert time_slice.granted() is None
