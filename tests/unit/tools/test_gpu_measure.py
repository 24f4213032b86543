"""What is made of times on a GPU: fractions of its limits, and medians that leave out what was not the kernel's."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.machine import parse_clocks, stamp
from tools.gpu_kernels.measure import GpuLimits, Measured, Stopwatch, measure

LIMITS = GpuLimits(copy_bytes=1000.0, operations={"bfloat16": 1e5, "float8": 2e5})


@pytest.mark.parametrize(
    ("num_bytes", "operations", "precision", "expected"),
    [
        (500, 1e4, "bfloat16", (0.5, "memory")),
        (500, 1e5, "bfloat16", (1.0, "compute")),
        (500, 1e5, "float8", (0.5, "memory")),
        (500, 4e5, "float8", (2.0, "compute")),
        (500, 1e5, "int8", (1.0, "compute")),  # this GPU has no such product: as bfloat16
    ],
)
def test_the_limit_that_takes_longer_binds(
    num_bytes: float, operations: float, precision: str, expected: tuple[float, str]
) -> None:
    assert LIMITS.least_seconds(num_bytes, operations, precision) == expected


def test_without_a_peak_only_memory_is_a_limit() -> None:
    assert GpuLimits(10.0, {}).least_seconds(20, 1e30, "int8") == (2.0, "memory")


class Device:
    """Stands for a GPU: what is enqueued takes time on its clock; reading a buffer 1 ms, and more and more of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.read_seconds = 1e-3
        self.reads = 0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self.event())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 << 20))
        monkeypatch.setattr(torch, "sum", self.read)
        small = torch.zeros(2, 4)
        monkeypatch.setattr(torch, "zeros", lambda *shape, device: small)

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event

    def read(self, buffer: torch.Tensor, dim: int, out: torch.Tensor) -> None:
        self.now += self.read_seconds
        self.reads += 1

    def launcher(self, *seconds: float) -> object:
        """A launch that takes these times in turn."""
        turns = itertools.cycle(seconds)

        def launch() -> None:
            self.now += next(turns)

        return launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_the_time_of_a_launch_is_a_median_without_that_of_reading(device: Device) -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    launch = device.launcher(2e-3, 2e-3, 9e-3)
    assert stopwatch.seconds(launch, 0.01) == pytest.approx(2e-3)


def test_clocks_that_change_meanwhile_do_not_matter(device: Device) -> None:
    stopwatch = Stopwatch(torch.device("cpu"))

    def launch() -> None:
        device.now += 1e-3
        device.read_seconds *= 0.999

    assert stopwatch.seconds(launch, 0.0) == pytest.approx(1e-3, rel=0.02)


def test_what_takes_no_time_has_the_resolution_of_the_clock(device: Device) -> None:
    assert Stopwatch(torch.device("cpu")).seconds(device.launcher(0.0), 0.0) == 5e-7


def test_a_cold_cache_before_each_launch(device: Device) -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    reads: list[int] = []
    stopwatch.seconds(lambda: reads.append(device.reads), 0.0)
    warm_ups = 4
    between = [after - before for before, after in itertools.pairwise(reads[warm_ups:])]
    assert between
    assert min(between) >= 3  # behind the one, alone with nothing, and before the other


def case() -> Case:
    return Case("kernel", "name", {}, lambda device, seed: Prepared(lambda: None), num_bytes=1.0, operations=0.0)


def test_a_case_and_its_rival(device: Device) -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    prepared = Prepared(device.launcher(2e-3), rival=device.launcher(3e-3))
    found = measure(case(), prepared, stopwatch, LIMITS, 0.0)
    assert found.seconds == pytest.approx(2e-3)
    assert found.fraction == pytest.approx(0.5)  # 1 byte of 1000 a second takes 1 ms
    assert found.bound == "memory"
    assert found.speedup == pytest.approx(1.5)


def test_a_rival_that_does_not_run_is_no_failure(device: Device) -> None:
    def rival() -> None:
        raise RuntimeError("no such\nshape")

    found = measure(case(), Prepared(device.launcher(1e-3), rival=rival), Stopwatch(torch.device("cpu")), LIMITS, 0.0)
    assert (found.rival_seconds, found.speedup) == (None, None)
    assert found.rival_error == "RuntimeError: no such shape"


def test_without_a_rival_there_is_no_speedup() -> None:
    assert Measured(1.0, 0.5, "memory").speedup is None


def test_clocks_of_nvidia_smi() -> None:
    said = "575.57, 1980 MHz, 1980 MHz, 3201 MHz, 3201 MHz, 612.10 W, [N/A], 41\n"
    found = parse_clocks(said)
    assert found["driver"] == "575.57"
    assert found["SM clock under load"] == "1980 MHz"
    assert "power limit" not in found
    assert found["temperature, C"] == "41"


@pytest.mark.parametrize("said", ["", "No devices were found", "1, 2"])
def test_clocks_that_can_not_be_had(said: str) -> None:
    assert parse_clocks(said) == {}


def test_the_stamp_of_a_table() -> None:
    machine = {"card": "NVIDIA H200", "torch": "2.13.0+cu129 (CUDA 12.9)", "triton": "3.9.0"}
    assert stamp(machine, "2026-12-01") == "NVIDIA H200, 2026-12-01, torch 2.13.0+cu129, triton 3.9.0"
