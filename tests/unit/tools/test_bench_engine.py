"""The engine benchmark counts the work of a step, and its times add up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from config.schema import ModelConfig
from ipc.engine_messages import SamplingSpec
from kernels.cpu.build import detect_isa, find_compiler
from tests.conftest import REPOSITORY
from tests.unit.gpu_workers.tiny import save_tiny
from tools.bench_engine import __main__ as bench_engine
from tools.bench_engine import gpu_command
from tools.bench_engine.gpu import GpuTimes, step_work
from tools.bench_engine.random_models import SHAPES
from tools.gpu_kernels.measure import GpuLimits

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 48, 112, 6, 2, 8, 131
# rows and columns of a layer's weights; the MLP's gated one has its halves padded to a multiple of 32 rows
LAYER_VALUES = 80 * HIDDEN + HIDDEN * 48 + 256 * HIDDEN + HIDDEN * FFN


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, max_position_embeddings=512)
    return path


def run_tool(model: Path, written: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "tools.bench_engine", "--model", str(model), "--json", str(written), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done, json.loads(written.read_text())


def weight_bytes() -> int:
    """Of the float32 weights of all layers and of the head: their rows fill panels, whose size the instructions set."""
    panel = 32 if detect_isa() == "avx512" else 16
    qkv, hidden, head = (-(-rows // panel) * panel for rows in (80, HIDDEN, VOCABULARY))
    return 4 * (LAYERS * (qkv * HIDDEN + hidden * 48 + 256 * HIDDEN + hidden * FFN) + head * HIDDEN)


def check_times(result: dict[str, Any]) -> None:
    times = result["times"]
    assert times["steps"] >= 3
    assert 0 < times["kernels"] < times["interval"]
    assert 0 < times["outside"] < 1
    assert min(times["prepare"], times["sample"]) >= 0
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / times["interval"])


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_native_steps_are_compared_with_the_limits(tiny: Path, tmp_path: Path) -> None:
    arguments = ["--kernels", "native", "--seconds", "0.02", "--threads", "2", "--context", "20"]
    done, content = run_tool(tiny, tmp_path / "results.json", *arguments, "--prefill", "40,64", "--decode", "1,3")
    assert content["kernels"] == "native"
    results = {(result["phase"], result["tokens"]): result for result in content["results"]}
    assert list(results) == [("prefill", 40), ("prefill", 64), ("decode", 1), ("decode", 3)]
    for result in results.values():
        check_times(result)
        assert result["fraction"] > 0
        assert result["work"]["int16_operations"] == result["work"]["int8_operations"] == 0
    # a step of 64 prompt tokens, the last of which is sampled from; each sees itself and those before
    prefill = results["prefill", 64]
    products = 2 * (64 * LAYERS * LAYER_VALUES + VOCABULARY * HIDDEN)
    attention = 4 * LAYERS * HEADS * HEAD_DIM * (64 * 65 // 2)
    assert prefill["work"]["float32_operations"] == products + attention
    # float32 weights, and float16 keys and values of three contexts
    decode = results["decode", 3]
    kv = 2 * 2 * LAYERS * KV_HEADS * HEAD_DIM * 3 * decode["context"]
    assert decode["work"]["num_bytes"] == pytest.approx(weight_bytes() + kv)
    assert decode["context"] > 20
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("prefill", "decode"))]
    assert rows == [["prefill", "40"], ["prefill", "64"], ["decode", "1"], ["decode", "3"]]


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_what_windows_hide_is_no_work(tmp_path: Path) -> None:
    """Of three layers, the last has a window of 16."""
    settings = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    save_tiny(tmp_path, "qwen2", max_position_embeddings=512, **settings)
    arguments = ["--kernels", "native", "--seconds", "0.02", "--threads", "1", "--context", "20"]
    _, content = run_tool(tmp_path, tmp_path / "results.json", *arguments, "--prefill", "40", "--decode", "2")
    prefill, decode = content["results"]
    # the first 16 queries of the last layer see those up to themselves, the other 24 see 16
    seen = 2 * (40 * 41 // 2) + 16 * 17 // 2 + 24 * 16
    products = 2 * (40 * LAYERS * LAYER_VALUES + VOCABULARY * HIDDEN)
    assert prefill["work"]["float32_operations"] == products + 4 * HEADS * HEAD_DIM * seen
    layer_bytes = 2 * 2 * KV_HEADS * HEAD_DIM
    assert prefill["work"]["num_bytes"] == pytest.approx(weight_bytes() + 3 * 40 * layer_bytes), "all are read once"
    assert decode["context"] > 20
    assert decode["work"]["num_bytes"] == pytest.approx(weight_bytes() + 2 * (2 * decode["context"] + 16) * layer_bytes)


def test_torch_steps_have_times_only(tiny: Path, tmp_path: Path) -> None:
    arguments = ["--kernels", "torch", "--seconds", "0.02", "--threads", "1", "--context", "20"]
    _, content = run_tool(tiny, tmp_path / "results.json", *arguments, "--prefill", "", "--decode", "2")
    assert content["kernels"] == "torch"
    assert content["limits"] is None
    (result,) = content["results"]
    check_times(result)
    assert result["fraction"] is None


def test_what_cannot_be_measured_is_named(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_engine.main(["--model", str(tiny), "--prefill", "600"]) == 2
    assert "--prefill" in capsys.readouterr().err
    assert bench_engine.main(["--model", str(tiny / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--device cuda --kernels native", "--kernels: of a CPU's kernels, not with --device cuda"),
        ("--device cuda --kernels auto", "--kernels: of a CPU's kernels, not with --device cuda"),
        ("--device cuda --threads 2", "--threads: of a CPU's kernels, not with --device cuda"),
        ("--device cuda --dtype float32", "--dtype float32: not with --device cuda"),
        ("--device cuda --kv-dtype float32", "--kv-dtype float32: on a GPU bfloat16, as --dtype, int8 or fp8"),
        (
            "--device cuda --dtype float16 --kv-dtype bfloat16",
            "--kv-dtype bfloat16: on a GPU float16, as --dtype, int8",
        ),
        ("--dtype float16", "--dtype float16: not with --device cpu"),
        ("--kv-dtype fp8", "--kv-dtype fp8: with --device cuda only"),
    ],
)
def test_what_a_device_does_not_have_is_refused(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_engine.main(["--model", "x", *arguments.split()])
    assert stopped.value.code == 2
    assert f"error: {said}" in capsys.readouterr().err.splitlines()[-1]


def test_random_weights_are_never_integers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_engine.main(["--device", "cuda", "--shape", "smollm2-135m", "--quantization", "none"])
    assert "--quantization: not with --shape" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "dtype", "kv_dtype", "quantized", "drawn"),
    [
        ("", "bfloat16", "bfloat16", True, False),
        ("--dtype float16 --sampling drawn", "float16", "float16", True, True),
        ("--kv-dtype fp8 --quantization none", "bfloat16", "fp8", False, False),
        ("--dtype float16 --kv-dtype int8", "float16", "int8", True, False),
    ],
)
def test_a_gpu_is_measured_in_the_numbers_that_were_asked_for(
    arguments: str, dtype: str, kv_dtype: str, quantized: bool, drawn: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    backends: list[dict[str, object]] = []

    def make_backend(device: str, dtype: str, threads: None, **settings: object) -> SimpleNamespace:
        backends.append({"device": device, "dtype": dtype, **settings})
        return SimpleNamespace(device=torch.device("cpu"))

    def measure(model: object, numbers: ModelConfig, sampling: SamplingSpec, *_: object) -> list[GpuTimes]:
        asked.append((numbers.dtype, numbers.kv_dtype, sampling.temperature > 0))
        return []

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tiny / "triton"))
    monkeypatch.setattr(gpu_command, "make_backend", make_backend)
    monkeypatch.setattr(gpu_command, "assemble", lambda path, backend, quantization: SimpleNamespace(backend=backend))
    monkeypatch.setattr(gpu_command, "Stopwatch", lambda device: None)
    monkeypatch.setattr(gpu_command, "measure_limits", lambda *_: GpuLimits(1e12, {}))
    monkeypatch.setattr(gpu_command, "describe", lambda device: {"card": "a card"})
    monkeypatch.setattr(gpu_command, "measure", measure)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    sizes = ["--prefill", "64", "--context", "20"]
    assert bench_engine.main(["--device", "cuda", "--model", str(tiny), *sizes, *arguments.split()]) == 0
    assert asked == [(dtype, kv_dtype, drawn)]
    (backend,) = backends
    assert (backend["device"], backend["dtype"], backend["kv_dtype"]) == ("cuda", dtype, kv_dtype)
    assert backend["quantized"] is quantized


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_step_reads_is_counted_in_its_numbers(tied: bool) -> None:
    """Keys and values of 100 positions in 30 layers; the embedding only where it is the head, too."""
    arch = msgspec.structs.replace(SHAPES["smollm2-135m"], tie_embeddings=tied)
    for kv_dtype, key in (("bfloat16", 2 * 64), ("int8", 64 + 4), ("fp8", 64 + 4)):
        numbers = ModelConfig(dtype="bfloat16", kv_dtype=kv_dtype)  # type: ignore[arg-type]
        num_bytes, operations = step_work(arch, numbers, 1, 1, 30 * 100, 30 * 100)
        assert num_bytes == 2 * 134_515_008 + 30 * 100 * 2 * 3 * key
        assert operations == pytest.approx(2 * 134_515_008 + 30 * 100 * 4 * 9 * 64, rel=0.01)


@pytest.mark.parametrize(
    ("name", "value"), [("--prefill", "0"), ("--decode", "x"), ("--decode", "5000"), ("--context", "0")]
)
def test_impossible_numbers_are_refused_by_name(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_engine.main(["--model", "x", name, value])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err.splitlines()[-1]
