"""What the drills compute from the times they noted, and what they say of a server that fails."""

import asyncio
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tools.drills.itl import _longest_gap
from tools.drills.kv import kv_plan
from tools.drills.server import Reply, read_events, server
from tools.drills.slo import _is_good, read_trace

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_longest_gap_is_of_those_that_overlap_the_time_asked_for() -> None:
    times = [0.0, 5.0, 5.1, 5.3, 9.0]
    assert _longest_gap(times, 5.05, 5.2) == pytest.approx(0.2)
    assert _longest_gap(times, 4.9, 5.2) == 5.0, "it began before"
    assert _longest_gap(times, 5.2, 6.0) == pytest.approx(3.7), "it ended after"
    assert _longest_gap([1.0], 0.0, 9.0) == 0.0


@pytest.mark.parametrize(
    ("reply", "good"),
    [
        (Reply(0.0, 200, [1, 2, 3], [1.0, 1.05, 1.1], "length"), True),
        (Reply(0.0, 200, [1, 2, 3], [1.2, 1.25, 1.3], "length"), False),
        (Reply(0.0, 200, [1, 2, 3], [1.0, 1.05, 1.2], "length"), False),
        (Reply(0.0, 200, [1, 2, 3], [1.0, 1.05, 1.1], "length", "cut off"), False),
        (Reply(0.0, 429), False),
    ],
)
def test_a_good_request_met_both_limits_and_finished(reply: Reply, good: bool) -> None:
    options = Namespace(slo_ttft_ms=1000.0, slo_tpot_ms=60.0)
    assert _is_good(0.0, reply, options) is good


_EVENTS = (
    b": keep-alive\n\n"
    b'data: {"id": "x", "choices": [{"index": 0, "text": "a\\n\\nb", "token_ids": [1], "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"index": 0, "text": "", "token_ids": [2, 3], "logprobs": null}], "usage": null}\n\n'
    b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 4}}\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (b"data: [DONE]\n\n", ""),
        (b'data: {"error": {"message": "the engine is gone", "code": null}}\n\n', "the engine is gone"),
    ],
)
def test_events_are_read_however_they_are_cut(size: int, end: bytes, error: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        text = _EVENTS + end
        for start in range(0, len(text), size):
            yield text[start : start + size]

    reply = Reply(0.0)
    asyncio.run(read_events(pieces(), reply))
    assert (reply.token_ids, len(reply.times), reply.finish_reason, reply.error) == ([1, 2, 3], 3, "length", error)


def test_lengths_are_scaled_and_never_empty(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 1500, "input_length": 320, "output_length": 64}\n'
        '{"timestamp": 2000, "input_length": 3, "output_length": 1}\n'
        '{"timestamp": 2500, "input_length": 9, "output_length": 9}\n'
    )
    rows = read_trace(str(file), 1 / 32, 2)
    assert [(row.at, len(row.prompt), row.max_tokens) for row in rows] == [(1.5, 10, 2), (2.0, 1, 1)]


def test_help_names_every_drill() -> None:
    command = [sys.executable, "-m", "tools.drills", "--help"]
    text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert all(name in text for name in ("itl", "slo", "shortage", "soak", "overhead", "start", "grammars"))


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def start() -> None:
        async with server(str(tmp_path / "none.gguf")):
            raise AssertionError("it has started")

    with pytest.raises(SystemExit) as ended:
        asyncio.run(start())
    message = str(ended.value)
    assert "the server did not start" in message
    assert re.search(r"^  error: .*none\.gguf", message, re.MULTILINE)


def test_a_server_that_dies_leaves_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho ready http://localhost:1\nseq 1000 >&2\necho no more memory >&2\nexit 3\n")
    fake.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fake))

    async def run() -> None:
        async with server("any") as url:
            assert url == "http://localhost:1"
            await asyncio.sleep(1)

    asyncio.run(run())
    error = capsys.readouterr().err
    assert "the server died, with exit status 3" in error
    assert error.endswith("  1000\n  no more memory\n")
    assert "  900\n" not in error
    [kept] = re.findall(r"the end of (\S+):", error)
    assert Path(kept).read_text().startswith("1\n2\n")


def test_the_kv_of_a_token_is_what_the_launcher_plans(model_path: Path) -> None:
    command = [sys.executable, "-m", "launch", "--model", str(model_path), "--kv-memory", "64MiB", "--plan"]
    text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    blocks, size = re.findall(r"([\d,]+) blocks of (\d+) tokens", text)[0]
    plan = kv_plan(str(model_path))
    assert plan.block_size == int(size)
    assert int(blocks.replace(",", "")) == (64 << 20) // plan.block_bytes


def test_kv_of_a_model_that_is_not_there_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--model .*none"):
        kv_plan(str(tmp_path / "none.gguf"))
