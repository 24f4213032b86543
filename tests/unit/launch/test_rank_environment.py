"""Which variables a rank gets for its device and its kernels."""

from pathlib import Path
from typing import Any

import pytest

from config.schema import ChildSpec, Config, Endpoints, ModelArch, WorkerConfig
from launch.rank_environment import rank_environment
from tests.processes.fake_launch import ARCH


def spec(index: int = 0, arch: ModelArch = ARCH, **worker: Any) -> ChildSpec:
    return ChildSpec(
        role="worker",
        index=index,
        config=Config(worker=WorkerConfig(**worker)),
        arch=arch,
        model_path="none",
        served_names=("m",),
        endpoints=Endpoints(clients=(), scheduler="", workers="", stats=""),
        run_dir="/nowhere",
        incarnation=1,
        kv_memory_bytes=1,
        num_blocks=1,
    )


@pytest.mark.parametrize(
    ("visible", "index", "own"),
    [
        (None, 0, "0"),
        (None, 2, "2"),
        ("3", 0, "3"),
        ("3, 5", 1, "5"),
        ("GPU-8f1f, MIG-22aa", 1, "MIG-22aa"),
        ("", 0, "0"),
    ],
)
def test_each_rank_sees_a_gpu_of_its_own(visible: str | None, index: int, own: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    added = rank_environment(spec(index, device="cuda", kernels="triton"), environ)
    assert added["CUDA_VISIBLE_DEVICES"] == own
    assert added["TRITON_INTERPRET"] == "0"  # whatever the user's shell has


def test_triton_is_interpreted_on_a_cpu() -> None:
    assert rank_environment(spec(device="cpu", kernels="triton"), {}) == {"TRITON_INTERPRET": "1"}


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_other_ranks_on_cpus_have_their_threads(kernels: str) -> None:
    worker = {"device": "cpu", "kernels": kernels}
    assert rank_environment(spec(**worker), {"CUDA_VISIBLE_DEVICES": "1"}) == {}
    assert rank_environment(spec(threads=3, **worker), {}) == {"OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/tokenmill/kernels/triton"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/cache"}, "/cache/tokenmill/kernels/triton"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}, "/home/me/.cache/tokenmill/kernels/triton"),
        ({"HOME": "/home/me", "TOKENMILL_KERNEL_CACHE": "/own"}, "/own/triton"),
        ({"TOKENMILL_KERNEL_CACHE": "own"}, str(Path("own").absolute() / "triton")),
        ({"HOME": "/home/me", "TRITON_CACHE_DIR": "/theirs"}, None),
        ({}, None),
    ],
)
def test_compiled_kernels_are_kept_beside_the_others(environ: dict[str, str], folder: str | None) -> None:
    assert rank_environment(spec(device="cuda", kernels="triton"), environ).get("TRITON_CACHE_DIR") == folder
