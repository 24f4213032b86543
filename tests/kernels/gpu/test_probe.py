"""The program that looks for GPUs, with a stand-in for torch."""

import builtins
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.gpu import probe

REPOSITORY = Path(__file__).resolve().parents[3]
H200 = SimpleNamespace(name="NVIDIA H200", total_memory=150_000, major=9, minor=0)
MI300X = SimpleNamespace(
    name="AMD Instinct MI300X", total_memory=200_000, major=9, minor=4, gcnArchName="gfx942:sramecc+"
)


def fake_torch(*devices: Any, cuda: str | None = "13.0", problem: str = "", free: int | None = 140_000) -> Any:
    def init() -> None:
        if problem:
            raise RuntimeError(problem)

    def mem_get_info(index: int) -> tuple[int, int]:
        if free is None:
            raise RuntimeError("CUDA out of memory")
        return free, devices[index].total_memory

    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=SimpleNamespace(
            init=init,
            device_count=lambda: len(devices),
            get_device_properties=lambda index: devices[index],
            mem_get_info=mem_get_info,
        ),
    )


def look(monkeypatch: pytest.MonkeyPatch, torch: Any) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "torch", torch)
    return probe.look()


def test_each_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = look(monkeypatch, fake_torch(H200, MI300X))
    assert answer["devices"] == [
        {"name": "NVIDIA H200", "total_bytes": 150_000, "free_bytes": 140_000, "capability": "sm_90"},
        {"name": "AMD Instinct MI300X", "total_bytes": 200_000, "free_bytes": 140_000, "capability": "gfx942"},
    ]
    assert answer["problem"] == ""


def test_a_full_device_has_nothing_free(monkeypatch: pytest.MonkeyPatch) -> None:
    [device] = look(monkeypatch, fake_torch(H200, free=None))["devices"]
    assert (device["total_bytes"], device["free_bytes"]) == (150_000, 0)


def test_a_build_for_cpus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = look(monkeypatch, fake_torch(cuda=None))
    assert answer["devices"] == []
    assert answer["problem"].startswith("torch 2.13.0 is a build for CPUs")


def test_the_driver_s_own_words_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = "Found no NVIDIA driver on your system.\n  Please check it."
    assert look(monkeypatch, fake_torch(problem=words))["problem"] == (
        "Found no NVIDIA driver on your system. Please check it."
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    hidden = look(monkeypatch, fake_torch(problem="No CUDA GPUs are available"))
    assert hidden["problem"] == "No CUDA GPUs are available (CUDA_VISIBLE_DEVICES is '7')"


def test_a_torch_that_is_broken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    find = builtins.__import__

    def broken(name: str, *arguments: Any) -> Any:
        if name == "torch":
            raise OSError("libcudart.so: cannot open shared object file")
        return find(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert probe.look()["problem"] == "torch can't be imported: libcudart.so: cannot open shared object file"


def test_the_command_prints_one_line_of_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernels.gpu.probe"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    [line] = done.stdout.splitlines()
    answer = json.loads(line)
    assert set(answer) == {"devices", "problem", "versions"}
    assert set(answer["versions"]) >= {"torch", "triton"}
    assert bool(answer["devices"]) != bool(answer["problem"])
