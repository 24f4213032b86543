"""`python -m launch` as a user meets it, as far as nothing has to be loaded."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.kernels.cpu.conftest import FakeCompiler

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """With default settings but for these, and as if there were no GPU here."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", **environ}
    command = [sys.executable, "-m", "launch", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=180
    )


def test_a_setting_that_cannot_be_used_is_one_line_and_status_two() -> None:
    for arguments, environ, said in (
        ((), {}, "--model is missing"),
        (("--model", "m", "--port", "x"), {}, "--port: must be a whole number from 0 to 65535, not 'x'"),
        (("--model", "m"), {"TOKENMILL_TP": "0"}, "TOKENMILL_TP: must be a whole number from 1 to 64, not '0'"),
        (("--model", "m", "--api-key-file", "nowhere"), {}, "--api-key-file nowhere: No such file or directory"),
        (("--model", "m"), {"TOKENMILL_API_KEYS": ""}, "TOKENMILL_API_KEYS: expected keys of 1 to 512 printable"),
        (("--model", "m", "--tls-key", "key.pem"), {}, "--tls-key needs --tls-cert as well"),
        (("--model", "m", "--event-log", "/nowhere/x.log"), {}, "--event-log /nowhere/x.log: the folder /nowhere does"),
        (
            ("--model", "m", "--event-log", "tests/new", "--record", "tests/../tests/new"),
            {},
            "--record tests/../tests/new: the same file as that of --event-log",
        ),
        (("--model", "m", "--plan"), {"TOKENMILL_EVENT_LOG": "tests"}, "--event-log tests: Is a directory"),
        (("--model", "m", "--cors-origin", "a.example"), {}, "--cors-origin a.example: must be * or scheme, host"),
    ):
        done = run(*arguments, **environ)
        assert done.returncode == 2
        assert done.stdout == ""
        [line] = done.stderr.splitlines()
        assert line.startswith(f"error: {said}")


def test_a_model_that_is_not_there_and_a_port_in_use_end_with_status_one() -> None:
    missing = run("--model", "./nowhere", "--port", "0")
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: --model ./nowhere: no such file or directory")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        in_use = run("--model", "./nowhere", "--port", port)
    assert in_use.returncode == 1
    assert in_use.stderr.startswith(f"error: --port {port}: already in use")


def test_a_file_that_is_no_model_is_told_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF")
    done = run("--model", str(file), "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --model {file}: ")
    assert "Traceback" not in done.stderr


def test_the_plan_is_printed_and_nothing_is_started(model_path: Path) -> None:
    numbers = "--dtype", "float32", "--kv-dtype", "float32"
    done = run("--model", str(model_path), "--plan", "--max-model-len", "1024", "--kv-memory", "64MiB", *numbers)
    assert done.returncode == 0, done.stderr
    assert "134.5 M parameters" in done.stdout
    # 64 MiB / (2 x 30 layers x 3 KV heads x 64 x 4 bytes x 16 tokens) = 91 blocks: 1,456 tokens, one sequence of 1,024.
    assert "max concurrent tokens 1,456" in done.stdout
    assert "91 blocks of 16 tokens" in done.stdout


def test_without_compiled_kernels_plain_torch_is_planned(model_path: Path, tmp_path: Path) -> None:
    """Where there is no compiler, one that fails, and one whose library is none."""
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'no space left' >&2; exit 1; }\n")
    failing.chmod(0o755)
    useless = FakeCompiler(tmp_path / "useless").path
    for number, (compiler, said) in enumerate(
        [("/nowhere/c++", "CXX names /nowhere/c++"), (failing, "no space left"), (useless, "they can't be loaded")]
    ):
        variables = {"CXX": str(compiler), "TOKENMILL_KERNEL_CACHE": str(tmp_path / str(number))}
        done = run("--model", str(model_path), "--plan", "--dtype", "float32", "--kv-memory", "64MiB", **variables)
        assert done.returncode == 0, done.stderr
        # 2 x 30 layers x 3 KV heads x 64 x 4 bytes
        assert "45.0 KiB a token in float32" in done.stdout
        chosen = done.stdout.partition("  kernels torch, many times slower")[2]
        assert said in chosen
        assert "Traceback" not in done.stderr + done.stdout


def test_an_instruction_set_that_there_is_not_ends_the_start(model_path: Path) -> None:
    for kernels in ("auto", "native"):
        done = run("--model", str(model_path), "--plan", "--kernels", kernels, TOKENMILL_CPU_ISA="sse9")
        assert done.returncode == 2
        assert done.stderr == "error: TOKENMILL_CPU_ISA: 'sse9' is not one of avx512, avx2, portable\n"


def test_what_needs_compiled_kernels_says_why_there_are_none(model_path: Path, tmp_path: Path) -> None:
    for flags, status in (
        (("--kernels", "native"), 1),
        (("--pin-threads", "--threads", "1"), 2),
        (("--dtype", "float32", "--kv-dtype", "int8"), 2),
    ):
        variables = {"CXX": "/nowhere/c++", "TOKENMILL_KERNEL_CACHE": str(tmp_path)}
        done = run("--model", str(model_path), "--plan", *flags, **variables)
        assert done.returncode == status
        assert done.stderr.startswith("error: --")
        assert "CXX names /nowhere/c++" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_compilers_with_the_launcher(model_path: Path, tmp_path: Path, number: int) -> None:
    compiler = FakeCompiler(tmp_path / "slow")
    compiler.hold.touch()
    variables = {"CXX": str(compiler.path), "TOKENMILL_KERNEL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "launch", "--model", str(model_path), "--port", "0"]
    launcher = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | variables, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not compiler.calls():
            assert time.monotonic() < deadline, "no compiler was started"
            time.sleep(0.05)
        children = psutil.Process(launcher.pid).children(recursive=True)
        assert children
        launcher.send_signal(number)
        assert launcher.wait(20) == 0
        assert psutil.wait_procs(children, timeout=10)[1] == []
    finally:
        launcher.kill()
        compiler.hold.unlink()


def test_a_plan_that_does_not_fit_says_what_to_do(model_path: Path) -> None:
    done = run("--model", str(model_path), "--plan", "--kv-memory", "900TiB")
    assert done.returncode == 1
    assert "The model does not fit" in done.stderr
    assert "--kv-memory" in done.stderr.partition("What helps:")[2]


def test_no_place_for_the_sockets_is_told_without_a_traceback(tmp_path: Path, model_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    flags = ("--model", str(model_path), "--port", "0", "--kv-memory", "64MiB")
    done = run(*flags, TMPDIR=str(long), XDG_RUNTIME_DIR=str(long))
    assert done.returncode == 1
    assert "error: No directory can be made for this run's sockets" in done.stderr
    assert "Traceback" not in done.stderr
