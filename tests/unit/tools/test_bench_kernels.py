"""The kernel benchmark counts the work that the operations do, and prints and writes what it says."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kernels.cpu.build import find_compiler
from kernels.cpu.library import load
from tests.conftest import REPOSITORY
from tools.bench_kernels import __main__ as bench_kernels
from tools.bench_kernels.cases import Place, all_cases
from tools.bench_kernels.limits import Limits, Work
from tools.bench_kernels.weights import Weights

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")

# name: bytes, operations of float32, int16 and int8; by hand. For 8 outputs and 32 inputs, an int4 weight has 128 bytes
# of codes and 32 of scales and minimums, an int8 weight 256 and 32. A token has 3 KV heads of 64: 384 keys and values.
WORK = {
    "linear/float32/576x576/4": (576 * 576 * 4, 2 * 4 * 576 * 576, 0, 0),
    "linear/int4/576x576/8": (72 * 18 * 160, 0, 0, 2 * 8 * 576 * 576),
    "linear/int8/960x576/1": (120 * 18 * 272, 0, 2 * 960 * 576, 0),
    "gated/bfloat16/3072x576/1": (3072 * 576 * 2, 2 * 3072 * 576, 0, 0),
    "logits/int4/49152x576/1": (6144 * 18 * 160, 0, 0, 2 * 49152 * 576),
    "greedy/int4/49152x576/8": (6144 * 18 * 160, 0, 0, 2 * 8 * 49152 * 576),
    "norm/576/8": (4 * (2 * 8 * 576 + 576), 5 * 8 * 576, 0, 0),
    "rope/float32/8": (4 * 8 * 960, 3 * 8 * 768, 0, 0),
    "decode/bfloat16/8x128": (8 * 128 * 384 * 2, 4 * 8 * 128 * 576, 0, 0),
    "prefill/float32/512@0": (512 * 384 * 4, 4 * 576 * (512 * 513 // 2), 0, 0),
    "decode/float16/8x4096w1024": (8 * 1024 * 384 * 2, 4 * 8 * 1024 * 576, 0, 0),
    # the first of 512 queries, at 1536, sees from 513 on
    "prefill/int8/512@1536w1024": ((2048 - 513) * 2 * 3 * 68, 4 * 576 * 512 * 1024, 0, 0),
    "embed/bfloat16/49152x576/8": (8 * 576 * 2, 0, 0, 0),
}


@needs_compiler
@pytest.mark.parametrize("name", WORK)
def test_work_of_a_case(name: str) -> None:
    library = load()
    place = Place(library, 2, Weights(library, 1), 1)
    limits = Limits(2, 1e9, 1e9, 1e9, 1e9)
    (case,) = (case for case in all_cases(()) if case.name == name)
    result = bench_kernels.measure(case, place, limits, 1e-3)
    assert result.work == Work(*WORK[name])
    longest = max(result.work.num_bytes, result.work.operations) / 1e9
    assert result.fraction * result.seconds == pytest.approx(longest)


@needs_compiler
def test_copies_fill_the_working_set() -> None:
    library = load()
    (case,) = (case for case in all_cases(()) if case.name == "linear/int4/576x576/8")
    recorded = case.record(Place(library, 1, Weights(library, 1_000_000), 1_000_000))
    assert len({op.weight for op in recorded.ops}) == 5  # of 207,360 bytes each


def test_every_kernel_has_cases_and_every_case_a_name() -> None:
    names = [case.name for case in all_cases(())]
    assert len(set(names)) == len(names)
    kernels = Counter(name.split("/")[0] for name in names)
    rows = 6
    assert kernels["gated"] == kernels["logits"] == kernels["greedy"] == 4 * rows
    assert kernels["linear"] == 3 * 4 * rows
    assert kernels["decode"] == 4 * (9 + 3)
    assert kernels["prefill"] == 4 * (2 + 1)
    assert {"norm", "rope", "embed"} < set(kernels)


def test_the_limit_that_takes_longer_binds() -> None:
    limits = Limits(1, read_bytes=10.0, float32_operations=100.0, int16_operations=400.0, int8_operations=800.0)
    assert limits.least_seconds(Work(50, 100, 400, 800)) == (5.0, "memory")
    assert limits.least_seconds(Work(10, 100, 400, 800)) == (3.0, "compute")


@needs_compiler
def test_command_prints_and_writes_every_case(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    command = [sys.executable, "-m", "tools.bench_kernels", "--seconds", "0.001", "--threads", "2"]
    command += ["--shape", "40", "64", "--only", "linear/*", "--json", str(written)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    content = json.loads(written.read_text())
    expected = [f"linear/{kind}/40x64/{n}" for kind in ("float32", "bfloat16", "int4", "int8") for n in (1, 4, 8, 32)]
    names = [case["name"] for case in content["cases"]]
    assert set(expected) < set(names)
    assert len(names) == 4 * 6
    assert content["limits"].pop("threads") == 2
    assert all(rate > 0 for rate in content["limits"].values())
    assert all(case["fraction"] > 0 and case["seconds"] > 0 for case in content["cases"])
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("linear/")] == names
    assert "24/24 linear/int8/40x64/512" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "0"], "--threads"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--shape", "8", "33"], "a multiple of 32"),
        (["--only", "nothing"], "--only"),
        (["--json", "no/such/folder/x.json"], "--json"),
        (["--device", "cuda", "--threads", "2"], "--threads: of a CPU's kernels, not with --device cuda"),
        (["--device", "cuda", "--shape", "64", "64"], "--shape: of a CPU's kernels, not with --device cuda"),
    ],
)
def test_impossible_values_are_refused_by_name(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_kernels.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_without_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TOKENMILL_KERNEL_CACHE", str(tmp_path))
    load.cache_clear()
    assert bench_kernels.main(["--only", "norm/*"]) == 2
    assert "no-such-compiler" in capsys.readouterr().err
