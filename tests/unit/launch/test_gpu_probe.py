"""How the launcher asks for GPUs, with programs that answer in many ways."""

import json
import sys
from typing import Any

import msgspec
import pytest

from config.machine import Gpu, Machine
from config.sources import read_settings
from launch import gpu_probe

MACHINE = Machine(cores=4, memory_available=1 << 34)
GPU = Gpu(name="NVIDIA X", total_bytes=1 << 34, free_bytes=1 << 33, capability="sm_90")


def find(monkeypatch: pytest.MonkeyPatch, program: str, *argv: str, count: int = 1) -> tuple[Machine, list[str]]:
    """What is found, and what was said meanwhile."""
    monkeypatch.setattr(gpu_probe, "_COMMAND", [sys.executable, "-c", program])
    monkeypatch.setattr(gpu_probe, "count_gpus", lambda: count)
    said: list[str] = []
    config = read_settings(["--model", "m", *argv], {}, "0").config
    return gpu_probe.find_gpus(config, MACHINE, said.append), said


def answering(**answer: Any) -> str:
    return f"print('a library says something first'); print({json.dumps(json.dumps(answer))})"


def test_the_program_s_answer_is_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cu130", "triton": "3.9.0"}
    program = answering(devices=[msgspec.to_builtins(GPU)], problem="", versions=versions)
    machine, said = find(monkeypatch, program)
    assert machine.gpus == (GPU,)
    assert machine.gpu_problem == ""
    assert machine.gpu_software == "torch 2.13.0+cu130, triton 3.9.0"
    assert said == ["looking for GPUs"]


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (answering(problem="the driver is too old"), "the driver is too old"),
        ("import sys; sys.exit('no such library')", "the program that looks for them failed: no such library"),
        ("raise SystemExit(3)", "the program that looks for them failed: it ended with status 3"),
        ("print('nonsense')", "the program that looks for them failed: it ended with status 0"),
        ("import time; time.sleep(60)", "the program that looks for them did not answer within 1 seconds"),
    ],
)
def test_what_goes_wrong_is_why_there_are_none(monkeypatch: pytest.MonkeyPatch, program: str, problem: str) -> None:
    monkeypatch.setattr(gpu_probe, "_PATIENCE", 1.0)
    machine, _ = find(monkeypatch, program)
    assert (machine.gpus, machine.gpu_problem) == ((), problem)


@pytest.mark.parametrize(
    ("argv", "count", "asks"),
    [
        ("--device cuda", 0, True),
        ("--device cpu", 1, False),
        ("", 1, True),
        ("", 0, False),
        ("--kernels triton", 1, True),
        ("--kernels torch", 1, False),
        ("--kernels native", 1, False),
    ],
)
def test_nobody_waits_for_an_answer_without_a_use(
    monkeypatch: pytest.MonkeyPatch, argv: str, count: int, asks: bool
) -> None:
    _, said = find(monkeypatch, answering(), *argv.split(), count=count)
    assert bool(said) is asks


def test_a_missing_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(monkeypatch, answering())[0].triton_problem == ""
    monkeypatch.setattr(gpu_probe.importlib.util, "find_spec", lambda name: None)
    assert find(monkeypatch, answering(), "--device", "cpu")[0].triton_problem == "it is not installed"
