"""The settings that are searched: what the user has said stays, and what cannot be is told apart."""

from pathlib import Path
from typing import Any

import pytest

from config.arch import read_arch
from config.machine import Machine
from config.schema import Config, ModelArch, ModelConfig, SchedulerConfig, WorkerConfig
from config.sources import ConfigError
from tools.loadgen.slo import Slo
from tools.tune.space import SEARCHED, Space, Workload

MACHINE = Machine(cores=4, memory_available=8 << 30, native_kernels=True)
SLO = Slo(ttft=1.0, tpot=0.06)
LOAD = Workload(longest_prompt=600, requests=100, shares_prefixes=True)


@pytest.fixture
def arch(model_path: Path) -> ModelArch:
    return read_arch(model_path)


def space(arch: ModelArch, load: Workload = LOAD, slo: Slo = SLO, **changes: Any) -> Space:
    scheduler = changes.pop("scheduler", SchedulerConfig())
    worker = WorkerConfig(device="cpu", kv_memory=changes.pop("kv_memory", "64MiB"))
    asked = Config(model=ModelConfig(model="m"), scheduler=scheduler, worker=worker)
    return Space(asked, arch, MACHINE, given=changes.pop("given", ()), slo=slo, workload=load, **changes)


def values(found: Space, name: str) -> tuple[Any, ...]:
    return next((dimension.values for dimension in found.dimensions if dimension.name == name), ())


def test_the_first_value_is_what_the_server_takes_and_none_stands_twice(arch: ModelArch) -> None:
    found = space(arch, may_refuse=True)
    assert {dimension.name for dimension in found.dimensions} == set(SEARCHED)
    for dimension in found.dimensions:
        assert dimension.values[0] == getattr(SchedulerConfig(), dimension.name)
        settled = getattr(found.default.config, dimension.name)
        assert settled not in dimension.values[1:]
        assert len(set(dimension.values)) == len(dimension.values)
    assert found.flags((0,) * len(found.sizes)) == []
    assert found.candidate((0,) * len(found.sizes)) == found.default


def test_what_the_user_says_is_kept(arch: ModelArch) -> None:
    found = space(arch, scheduler=SchedulerConfig(max_seqs=8, prefer="decode"), given={"max_seqs", "prefer"})
    assert not {"max_seqs", "prefer"} & {dimension.name for dimension in found.dimensions}
    for point in ((0,) * len(found.sizes), (1,) * len(found.sizes)):
        candidate = found.candidate(point)
        assert candidate is None or (candidate.config.max_seqs, candidate.config.prefer) == (8, "decode")


@pytest.mark.parametrize("name", SEARCHED)
def test_a_default_that_the_user_says_is_kept_too(arch: ModelArch, name: str) -> None:
    assert values(space(arch, may_refuse=True), name)
    found = space(arch, may_refuse=True, given={name})
    assert found.is_given(name)
    assert {dimension.name for dimension in found.dimensions} == set(SEARCHED) - {name}


def test_flags_are_those_of_the_server(arch: ModelArch) -> None:
    found = space(arch, only=("max_itl_ms", "prefer"))
    assert [dimension.name for dimension in found.dimensions] == ["max_itl_ms", "prefer"]
    assert values(found, "max_itl_ms") == (None, 30.0, 42.0, 51.0, 60.0, 78.0)
    assert found.flags((2, 2)) == ["--max-itl-ms=42", "--prefer=decode"]
    candidate = found.candidate((2, 2))
    assert candidate is not None
    assert (candidate.config.max_itl_ms, candidate.config.prefer) == (42.0, "decode")


def test_settings_that_contradict_each_other_are_no_candidates(arch: ModelArch) -> None:
    found = space(arch, only=("max_itl_ms", "prefer"))
    assert found.candidate((1, 1)) is None  # --max-itl-ms with --prefer prefill
    many = Workload(longest_prompt=600, requests=300, shares_prefixes=False)
    found = space(arch, many, only=("max_seqs", "max_step_tokens"))
    seqs, steps = values(found, "max_seqs"), values(found, "max_step_tokens")
    assert found.candidate((seqs.index(128), steps.index(64))) is None
    assert found.candidate((seqs.index(128), steps.index(128))) is not None


def test_values_follow_from_the_load(arch: ModelArch) -> None:
    short = space(arch, Workload(longest_prompt=50, requests=10, shares_prefixes=False), Slo(e2e=5.0))
    names = {dimension.name for dimension in short.dimensions}
    # No prompt is long or shared, and there is no first token to be late for.
    assert not names & {"prefill_chunk", "long_prompt_tokens", "long_step_share", "policy", "ttft_target_ms"}
    assert max(values(short, "max_seqs")[1:]) <= 64
    assert values(short, "max_itl_ms")[1:] == (20.0, 50.0, 100.0, 200.0)
    assert values(space(arch), "policy") == ("fcfs", "longest-prefix")
    assert all(value < 600 for value in values(space(arch), "prefill_chunk")[1:])


def test_defaults_that_do_not_fit_are_an_error(arch: ModelArch) -> None:
    with pytest.raises(ConfigError, match="memory"):
        space(arch, kv_memory="100GiB")
