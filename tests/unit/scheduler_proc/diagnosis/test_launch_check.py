"""What is advised is nothing that the launcher refuses, on the machine and for the command line it is advised for."""

import math
from functools import cache

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from config.bytesize import parse_size
from config.machine import Gpu, Machine
from config.resolve import resolve
from config.schema import ModelArch, SchedulerConfig
from config.sources import ConfigError, read_settings
from ipc.stats_messages import Diagnosis
from scheduler_proc.diagnosis.changes import Engine, _sizes
from scheduler_proc.diagnosis.evidence import flag
from scheduler_proc.diagnosis.launch_check import LaunchCheck
from scheduler_proc.diagnosis.processes import Cpu
from tests.sim.loads import Observed, load
from tools.model_shapes import LLAMA_3_1_8B, SMOLLM2_135M

MIB, GIB = 1 << 20, 1 << 30
CPU = Machine(
    cores=4,
    memory_available=60 * GIB,
    cpu_features=frozenset({"avx512_bf16"}),
    native_kernels=True,
    core_cpus=(0, 1, 2, 3),
)
TIGHT = msgspec.structs.replace(CPU, memory_available=2100 * MIB)
GPU = Machine(
    cores=16,
    memory_available=120 * GIB,
    gpus=(Gpu(name="NVIDIA H200", total_bytes=140 * GIB, free_bytes=139 * GIB, capability="sm_90"),),
)
SMALL_GPU = msgspec.structs.replace(GPU, gpus=(GPU.gpus[0].sized(24 * GIB),), memory_available=12 * GIB)
# Loads and settings that are short of something, and what then might be advised.
SHORT = {
    "places": (load(2, 60, 5, 100, 60), {"max_seqs": 2}, 10_000),
    "steps": (load(2, 60, 5, 100, 60), {"max_step_tokens": 32, "max_seqs": 16, "prefill_chunk": 32}, 10_000),
    "blocks": (load(1, 100, 5, 200, 100), {}, 60),
    "blocks, waiting": (load(1, 100, 6, 100, 60), {"kv_shortage": "wait"}, 40),
    "cache": (load(3, 60, 2, 60, 30, shared=512), {}, 60),
    "gaps": (load(2, 60, 4, 100, 60), {"max_itl_ms": 12}, 10_000),
}
STARTS: list[tuple[ModelArch, Machine, list[str]]] = [
    (SMOLLM2_135M, CPU, []),
    (SMOLLM2_135M, CPU, ["--kernels", "torch", "--kv-memory", "1GiB"]),
    (SMOLLM2_135M, CPU, ["--pin-threads", "--threads", "2"]),
    (SMOLLM2_135M, TIGHT, ["--kv-memory", "600MiB"]),
    (SMOLLM2_135M, TIGHT, ["--max-model-len", "2048"]),
    (LLAMA_3_1_8B, GPU, []),
    (LLAMA_3_1_8B, SMALL_GPU, ["--max-model-len", "4096"]),
    (LLAMA_3_1_8B, GPU, ["--kv-memory", "40GiB"]),
]


@cache
def run(name: str) -> Observed:
    """One that is short of that."""
    trace, settings, blocks = SHORT[name]
    return Observed(trace, SchedulerConfig(**settings), blocks)  # type: ignore[arg-type]


def advised(
    monkeypatch: pytest.MonkeyPatch, name: str, arch: ModelArch, machine: Machine, argv: list[str], *, knows: bool
) -> tuple[Diagnosis, list[str]]:
    """A diagnosis of an engine that was started so, whose launch is known or not, and its command line."""
    observed, (_, settings, blocks) = run(name), SHORT[name]
    lines = ["--model", "m", *argv]
    for setting, value in settings.items():
        lines += [f"--{setting.replace('_', '-')}", str(value)]
    asked = read_settings(lines, {}, "").config
    resolved = resolve(asked, arch, machine)
    assert resolved.plan.fits
    config = msgspec.structs.replace(resolved.config, scheduler=observed.config)
    check = LaunchCheck(asked, arch, machine) if knows else None
    engine = Engine(config=config, num_blocks=blocks, kv_memory_bytes=resolved.plan.kv, cores=16, launch=check)
    monkeypatch.setattr(observed, "engine", lambda: engine)
    slow = Cpu(tokenizer_cores=1.0, frontend_cores=1.0, tokenizer_lag=1.0, frontend_lag=1.0, encode_wait=3.0)
    return observed.diagnosis(slow), lines


def refused(told: Diagnosis, lines: list[str], arch: ModelArch, machine: Machine) -> set[str]:
    """The settings that are advised although the server would not start with them."""
    found = set()
    for metric in told.metrics:
        for cause in metric.causes:
            if not cause.setting:
                continue
            try:
                asked = read_settings([*lines, *flag(cause.setting, cause.after).split()], {}, "").config
                if not resolve(asked, arch, machine).plan.fits:
                    found.add(cause.setting)
            except ConfigError:
                found.add(cause.setting)
    return found


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize(("arch", "machine", "argv"), STARTS, ids=range(len(STARTS)))
def test_the_server_starts_with_all_that_is_advised(
    monkeypatch: pytest.MonkeyPatch, name: str, arch: ModelArch, machine: Machine, argv: list[str]
) -> None:
    told, lines = advised(monkeypatch, name, arch, machine, argv, knows=True)
    assert any(cause.setting for metric in told.metrics for cause in metric.causes)
    assert refused(told, lines, arch, machine) == set()


@pytest.mark.parametrize(
    ("start", "wrong"), [(1, "--kv-dtype"), (3, "--kv-memory"), (5, "--kv-memory")], ids=["torch", "memory", "GPU"]
)
def test_that_is_so_because_the_launch_is_known(monkeypatch: pytest.MonkeyPatch, start: int, wrong: str) -> None:
    arch, machine, argv = STARTS[start]
    told, lines = advised(monkeypatch, "blocks", arch, machine, argv, knows=False)
    assert wrong in refused(told, lines, arch, machine)


def check(arch: ModelArch, machine: Machine, *argv: str) -> LaunchCheck:
    return LaunchCheck(read_settings(["--model", "m", *argv], {}, "").config, arch, machine)


@pytest.mark.parametrize(("arch", "machine", "argv"), STARTS, ids=range(len(STARTS)))
def test_the_largest_pools_there_is_room_for_fit(arch: ModelArch, machine: Machine, argv: list[str]) -> None:
    launch = check(arch, machine, *argv)
    most = launch.most_kv_bytes
    assert launch.plan_with("--kv-memory", f"{most + machine.memory_available + 140 * GIB}") is None
    if "--max-model-len" in argv or machine.gpus == ():  # else a larger pool means a longer context, with its buffers
        assert launch.plan_with("--kv-memory", str(most)) is not None
    if machine.gpus == ():
        assert launch.plan_with("--host-kv-memory", str(launch.most_host_kv_bytes)) is not None


def test_a_pool_is_advised_as_large_as_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    arch, machine, argv = STARTS[3]
    told, _ = advised(monkeypatch, "blocks", arch, machine, argv, knows=True)
    sizes = {parse_size(cause.after) for metric in told.metrics for cause in metric.causes if "kv-mem" in cause.setting}
    most = check(arch, machine, *argv).most_kv_bytes
    assert 1200 * MIB > most > 720 * MIB
    assert sizes == {most // MIB * MIB}


@given(wanted=st.lists(st.integers(MIB, 1 << 45), max_size=4), most=st.integers(MIB, 1 << 45) | st.just(math.inf))
@example(wanted=[int(1.996 * GIB)], most=int(1.997 * GIB))  # as three digits, 2.00GiB
def test_no_size_that_is_written_is_more_than_there_is_room_for(wanted: list[int], most: float) -> None:
    for size, text in _sizes(wanted, most):
        assert parse_size(text) == size <= most
        assert any(size <= 1.006 * asked for asked in wanted)


def test_values_are_read_as_on_the_command_line() -> None:
    launch = check(SMOLLM2_135M, CPU, "--max-seqs", "8")
    assert launch.plan_with("--prefix-cache", "off") is not None
    assert launch.plan_with("--quantization", "none") is not None
    assert launch.plan_with("--max-itl-ms", "none") is not None
    assert launch.plan_with("--max-seqs", "0") is None
    assert launch.plan_with("--max-seqs", "1000000") is None
    assert launch.plan_with("--kv-memory", "much") is None
    plan, with_host = launch.plan_with("--host-kv-memory", "0"), launch.plan_with("--host-kv-memory", "1GiB")
    assert plan is not None
    assert with_host == msgspec.structs.replace(plan, num_host_blocks=GIB // plan.block_bytes)
