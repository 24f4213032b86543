"""Processes killed under load, with `--max-restarts 0`: nobody hangs, nothing is left behind, the exit status tells."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.e2e.server import SMALL, Server, process_role
from tests.e2e.sse import Answer, client_session, post

FLAGS = ("--max-restarts", "0", *SMALL)
STREAMS = 16


async def kill_under_load(server: Server, victim: str) -> list[Answer]:
    """16 streams, a kill -9 of one process once all have begun, and what each stream got in the end."""
    async with client_session() as session:
        tasks = [
            asyncio.create_task(
                post(
                    session,
                    server.url + "/v1/completions",
                    {
                        "model": "smol",
                        "prompt": f"Story number {number}:",
                        "max_tokens": 1500,
                        "ignore_eos": True,
                        "stream": True,
                    },
                )
            )
            for number in range(STREAMS)
        ]
        await asyncio.sleep(2.0)
        assert not any(task.done() for task in tasks), [task.result() for task in tasks if task.done()]
        if victim == "launcher":
            server.process.kill()
        else:
            server.child(victim).send_signal(signal.SIGKILL)
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks)


@pytest.mark.parametrize("victim", ["frontend", "tokenizer", "scheduler", "worker"])
def test_a_killed_process_ends_everything_and_every_stream_hears_of_it(model_path: Path, victim: str) -> None:
    """B089, B090."""
    server = Server(model_path, *FLAGS)
    answers = asyncio.run(kill_under_load(server, victim))
    for answer in answers:
        if victim == "frontend":
            assert answer.broken
        else:
            assert answer.error is not None, answer
            assert answer.error["type"] == "server_error"
        assert not answer.done
    assert server.wait(10) != 0
    assert server.survivors(5) == []
    assert victim in server.stderr
    assert "Traceback" not in server.stderr


def test_a_killed_launcher_leaves_no_child(model_path: Path) -> None:
    server = Server(model_path, *FLAGS)
    answers = asyncio.run(kill_under_load(server, "launcher"))
    assert all(answer.broken or answer.error for answer in answers)
    assert server.survivors(5) == []


def test_only_the_worker_has_torch(server: Server) -> None:
    for child in server.children:
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        assert ("libtorch" in maps) == (process_role(child).startswith("worker")), child.cmdline()
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_sigterm_lets_running_requests_finish(model_path: Path) -> None:
    async def main(server: Server) -> Answer:
        async with client_session() as session:
            body = {"model": "smol", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
            task = asyncio.create_task(post(session, server.url + "/v1/completions", body))
            await asyncio.sleep(0.8)
            assert not task.done()
            server.process.send_signal(signal.SIGTERM)
            return await task

    server = Server(model_path, *FLAGS)
    answer = asyncio.run(main(server))
    assert answer.done
    assert answer.finish_reason == "length"
    assert server.wait(15) == 0
    assert server.survivors(5) == []


@pytest.mark.parametrize("signals", [1, 2])
def test_requests_that_cannot_finish_are_told_so_at_the_end(model_path: Path, signals: int) -> None:
    async def main(server: Server) -> list[Answer]:
        async with client_session() as session:
            body = {"model": "smol", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
            tasks = [asyncio.create_task(post(session, server.url + "/v1/completions", body)) for _ in range(4)]
            await asyncio.sleep(1.5)
            assert not any(task.done() for task in tasks)
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
            return await asyncio.gather(*tasks)

    server = Server(model_path, *FLAGS, "--drain-timeout", "1" if signals == 1 else "60")
    for answer in asyncio.run(main(server)):
        assert answer.error is not None
        assert "shutting down" in answer.error["message"]
        assert not answer.done
    assert server.wait(15) == signals - 1
    assert server.survivors(5) == []
