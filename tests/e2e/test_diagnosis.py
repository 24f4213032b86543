"""What a real server says of itself under loads whose trouble is known."""

import asyncio
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import SMALL, Server
from tests.e2e.sse import client_session, post


def diagnosed(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(server.url + "/diagnose", timeout=30) as response:
        told: dict[str, Any] = json.load(response)
    return told


def first(told: dict[str, Any], name: str) -> dict[str, Any]:
    [metric] = [metric for metric in told["metrics"] if metric["name"] == name]
    cause: dict[str, Any] = metric["causes"][0]
    return cause


def under_load(server: Server, clients: int, prompt_words: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The diagnosis after so many rounds of each client: the first that knows of all their requests."""

    async def client(session: Any, number: int) -> None:
        for turn in range(rounds):
            prompt = f"{number} {turn} " + "word " * prompt_words
            body = {"model": "smol", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            assert (await post(session, server.url + "/v1/completions", body)).status == 200

    async def run() -> None:
        async with client_session() as session:
            await asyncio.gather(*(client(session, number) for number in range(clients)))

    asyncio.run(run())
    deadline = time.monotonic() + 20
    while (told := diagnosed(server))["finished"] < clients * rounds:
        assert time.monotonic() < deadline, told
        time.sleep(0.2)
    return told


def test_a_queue_before_too_few_places_and_an_idle_engine(model_path: Path) -> None:
    with Server(model_path, *SMALL, "--max-seqs", "1") as server:
        idle = diagnosed(server)
        assert idle["arrived"] == 0
        assert idle["summary"] == "no requests: there is nothing to diagnose"
        busy = under_load(server, clients=6, prompt_words=5, tokens=12, rounds=4)
        assert busy["arrived"] == 24
        cause = first(busy, "ttft")
        assert (cause["cause"], cause["setting"], cause["before"]) == ("queue", "--max-seqs", "1")
        assert busy["measures"]["length_finishes"] == 1.0
        assert busy["measures"]["frontend_cores"] > 0
        [ttft] = [metric for metric in busy["metrics"] if metric["name"] == "ttft"]
        assert cause["predicted"] < ttft["value"] / 1.5


@pytest.mark.slow
def test_a_queue_before_too_few_blocks(model_path: Path) -> None:
    flags = [*SMALL, "--kv-memory", "16MiB", "--max-model-len", "256"]
    with Server(model_path, *flags) as server:
        told = under_load(server, clients=16, prompt_words=100, tokens=60, rounds=3)
        cause = first(told, "concurrency")
        assert (cause["cause"], cause["setting"]) == ("kv_memory", "--kv-memory")
        assert told["measures"]["kv_usage"] > 0.5
