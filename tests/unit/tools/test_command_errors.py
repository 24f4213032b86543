"""What command lines say of a model that cannot be used: each flag and path once, and no traceback."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.bench_engine.__main__ import main as bench_engine
from tools.drills.kv import kv_plan
from tools.score.__main__ import main as score


def drills(model: str) -> str:
    with pytest.raises(SystemExit) as ended:
        kv_plan(model)
    return str(ended.value)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "bench_engine": lambda model: bench_engine(["--model", *model]),
    "score": lambda model: score(["--text", __file__, "--model", *model]),
}


def broken_models(tmp_path: Path) -> list[str]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights" / "config.json").write_text("{}")
    (tmp_path / "bad-config").mkdir()
    (tmp_path / "bad-config" / "config.json").write_text("{")
    (tmp_path / "bad-config" / "model.safetensors").write_bytes(b"")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "model.bin").write_bytes(b"")
    names = ("none.gguf", "no such place", "empty", "no-weights", "bad-config", "broken.gguf", "model.bin")
    return [str(tmp_path / name) for name in names]


def check(message: str, model: str) -> None:
    assert "Traceback" not in message
    assert Path(model).name in message
    assert message.count("--model") <= 1, message
    assert not re.search(r"\b(error|\w+Error|tools\.\w+|bench_\w+): .*\b\1: ", message), message


def test_the_drills(tmp_path: Path) -> None:
    for model in broken_models(tmp_path):
        message = drills(model)
        check(message, model)
        assert message.startswith(f"error: --model {model}: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_with_a_model_in_their_own_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for model in broken_models(tmp_path):
        assert COMMANDS[command]([model]) == 2
        check(capsys.readouterr().err, model)
