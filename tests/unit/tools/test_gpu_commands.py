"""What the commands around GPU kernels refuse before they begin, each in its last line."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY
from tools.bench_engine.__main__ import main as bench_engine
from tools.bench_kernels.__main__ import main as bench_kernels
from tools.check_gpu.__main__ import main as check_gpu
from tools.compile_kernels.__main__ import main as compile_kernels
from tools.tune_kernels.__main__ import main as tune_kernels

COMPILING: dict[str, Callable[[], int]] = {
    "bench_engine": lambda: bench_engine(["--device", "cuda", "--shape", "smollm2-135m"]),
    "bench_kernels": lambda: bench_kernels(["--device", "cuda"]),
    "check_gpu": lambda: check_gpu(["--quick", "--out", "/dev/null"]),
    "compile_kernels": lambda: compile_kernels(["--quick"]),
    "tune_kernels": lambda: tune_kernels([]),
}
CHOOSING: dict[str, Callable[[str], int]] = {
    "bench_kernels": lambda glob: bench_kernels(["--device", "cuda", "--only", glob]),
    "check_gpu": lambda glob: check_gpu(["--only", glob, "--out", "/dev/null"]),
    "compile_kernels": lambda glob: compile_kernels(["--only", glob]),
}


def status(command: Callable[[], int]) -> int | str | None:
    try:
        return command()
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize("name", COMPILING)
def test_a_cache_that_can_not_be_written_is_told_once(
    name: str, toy_family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert status(COMPILING[name]) == 2
    said = capsys.readouterr().err
    assert said.count(str(folder)) == 1
    assert said.splitlines()[-1].endswith(
        f": compiled kernels can't be kept in {folder}: Not a directory; "
        "set TRITON_CACHE_DIR to a folder that can be written"
    )


def test_the_interpreter_needs_no_cache(toy_family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").touch()
    out = tmp_path / "report.md"
    assert check_gpu(["--interpret", "--only", "toy_scale/right", "--out", str(out)]) == 0
    assert "1 of 1 cases" in out.read_text()


@pytest.mark.parametrize("name", CHOOSING)
def test_a_label_that_no_case_has_is_told_with_those_of_kernels(
    name: str, toy_family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(lambda: CHOOSING[name]("scale/*")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(
        "--only scale/*: no case has such a label, KERNEL/NAME; kernels: toy_scale, toy_broken, toy_deadly"
    )


def test_a_model_that_is_not_there_or_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--model", "none.gguf"], "--model none.gguf: no such file or directory"),
        (["--interpret", "--model", "/"], "--model: not with --interpret, which checks kernels only"),
    ):
        assert status(lambda arguments=arguments: check_gpu(["--out", "/dev/null", *arguments])) == 2  # type: ignore[misc]
        assert capsys.readouterr().err.endswith(f"error: {said}\n")


@pytest.mark.slow
def test_an_interrupt_ends_a_tool_without_a_traceback(tmp_path: Path) -> None:
    """While processes of its own compile."""
    arguments = ["--architecture", "sm_90", "--jobs", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "tools.compile_kernels", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("1/")
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait() == 130
    assert all(line.split("/")[0].isdigit() for line in said.splitlines()), said
