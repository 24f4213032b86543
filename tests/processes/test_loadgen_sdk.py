"""The load generator over the SDK, where the server asks for keys or cannot be had."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.curve import new_key_pair
from ipc.engine_client import EngineClient
from ipc.errors import RequestFailed, authentication_failed, cancelled, unavailable
from tests.processes.test_loadgen import LENIENT
from tests.unit.ipc.fake_tokenizer import FakeTokenizer
from tests.unit.ipc.test_curve import Keys
from tools.loadgen.__main__ import main


@contextlib.contextmanager
def serving(keys: Keys) -> Iterator[list[FakeTokenizer]]:
    """A scripted server that asks for keys, on its own thread: the tool handles signals, and so has the main one."""
    loop = asyncio.new_event_loop()
    started, ended = threading.Event(), asyncio.Event()
    found: list[FakeTokenizer] = []

    async def work() -> None:
        async with keys.serving() as tokenizer:
            found.append(tokenizer)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    assert started.wait(20)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def test_a_server_with_keys_is_measured_as_others_are(tmp_path: Path) -> None:
    keys, report = Keys(tmp_path), tmp_path / "report.json"
    with serving(keys) as [tokenizer]:
        who = ("--sdk-key", str(keys.known), f"--sdk-server-key={keys.server_key}")
        flags = ("--arrivals", "fixed:50", "--requests", "5", "--input-tokens", "3", "--json", str(report))
        assert main(["--sdk", keys.address, *who, *flags, *LENIENT]) == 0
        assert len(tokenizer.asked) == 5
    assert json.loads(report.read_text())["summary"]["outcomes"] == {"ok": 5}


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ("nobody", "only one side of the connection uses keys (--sdk-keys); --sdk-key and --sdk-server-key give this"),
        ("a stranger", "the server does not know this client's key (--sdk-keys)\n"),
        ("a client of another server", "its public key is another one\n"),
    ],
)
def test_who_is_not_let_in_gets_one_line(
    who: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = Keys(tmp_path)
    other = new_key_pair().public.decode()
    flags = {
        "nobody": [],
        "a stranger": ["--sdk-key", str(keys.unknown), f"--sdk-server-key={keys.server_key}"],
        "a client of another server": ["--sdk-key", str(keys.known), f"--sdk-server-key={other}"],
    }
    with serving(keys):
        assert main(["--sdk", keys.address, *flags[who]]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --sdk {keys.address}: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [unavailable(0, "it speaks another version"), authentication_failed("no"), cancelled(0)],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_sdk_raises_is_one_line(
    error: RequestFailed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def connect(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(EngineClient, "connect", connect)
    assert main(["--sdk", "ipc:///nowhere/clients-0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --sdk ipc:///nowhere/clients-0: {error.message}")
    assert err.count("\n") == 1
