"""Processes killed under load, with restarts: what goes on, what is told, and that it serves again.

The numbers of issue 3, point 8: `pytest -s -m slow tests/e2e/test_recovery.py`.
"""

import asyncio
import random
import re
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.server import SMALL, Server, is_alive
from tests.e2e.sse import Answer, client_session, post
from tests.exposition import value

RESTARTS = ("--max-restarts", "1000", "--hang-timeout", "10")
PATIENCE = 120.0  # seconds; only how long a test that fails takes
PROMPTS = ("Once upon a time", "The capital of France is", "def fibonacci(n):", "Dear Sir or Madam,")


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Server]:
    """One server for all deaths of this module."""
    with Server(model_path, *SMALL, *RESTARTS) as running:
        yield running


def request_of(number: int, max_tokens: int = 160, words: int = 0) -> dict[str, Any]:
    """Every second one is greedy, the others are sampled with a seed; `words` lengthen the prompt.

    Long enough by default for something to be done while it runs.
    """
    sampling = {"temperature": 0} if number % 2 == 0 else {"temperature": 1.0, "seed": number}
    context = " ".join(f"Item {number}.{word} of the list." for word in range(words))
    return {
        "model": "smol",
        "prompt": f"{context} {PROMPTS[number % len(PROMPTS)]}",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }


class Client:
    """One session with one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def complete(self, body: dict[str, Any]) -> Answer:
        return await post(self.session, self.url + "/v1/completions", body)

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def finished(self) -> float:
        """Choices finished since the start of the engine, over all frontends that there were."""
        async with self.session.get(self.url + "/metrics") as response:
            text = await response.text()
        return sum(value(text, "tokenmill:request_success_total", finished_reason=end) for end in ("stop", "length"))

    async def until(self, path: str, done: Callable[[int, dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask until the answer is as wanted; a connection refused or broken is no answer."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    status, body = await self.get(path)
                    if done(status, body):
                        return body
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)

    async def served_again(self) -> list[Answer]:
        """Send requests until one is served; the answers that came before it."""
        refused = []
        async with asyncio.timeout(PATIENCE):
            while (answer := await self.complete(request_of(0, max_tokens=2))).status != 200 or not answer.done:
                refused.append(answer)
                await asyncio.sleep(0.05)
        return refused

    async def all_running(self, count: int) -> None:
        """Until so many requests run, and have done so for some steps."""
        before = await self.until("/health/progress", lambda status, body: body.get("running") == count)
        after = await self.until("/health/progress", lambda status, body: body["step"] > before["step"] + 5)
        assert after["running"] == count, "requests ended before the test could do anything to them"


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Client]:
    async with client_session() as session:
        yield Client(session, server.url)


def assert_same(answer: Answer, alone: Answer) -> None:
    assert answer.error is None, answer.error
    assert answer.done
    assert not answer.broken
    assert answer.text == alone.text
    assert answer.usage["completion_tokens"] == alone.usage["completion_tokens"]
    assert answer.finish_reason == alone.finish_reason


def test_streams_go_on_with_the_same_tokens_after_a_worker_was_killed(engine: Server) -> None:
    async def main() -> None:
        bodies = [request_of(number, words=number) for number in range(8)]
        for body in bodies[4:6]:
            body["guided_regex"] = "([a-z]{2,9} ){200}"  # its matcher is built again from the outputs so far
        async with client_of(engine) as client:
            alone = [await client.complete(body) for body in bodies]
            before = engine.roles()
            streams = [asyncio.create_task(client.complete(body)) for body in bodies]
            await client.all_running(len(streams))
            before["worker-0"].send_signal(signal.SIGKILL)
            refusal = await client.until("/health/ready", lambda status, _: status == 503)
            assert refusal["error"]["code"] == "recovering"
            assert (await client.get("/health/live"))[0] == 200
            status, progress = await client.get("/health/progress")
            assert (status, progress["engine_ready"]) == (200, False)
            late = asyncio.create_task(client.complete(bodies[0]))
            for answer, expected in zip(await asyncio.gather(*streams), alone, strict=True):
                assert_same(answer, expected)
            assert_same(await late, alone[0])
            await client.until("/health/ready", lambda status, _: status == 200)
            progress = await client.until("/health/progress", lambda status, body: body["running"] == 0)
            assert progress["recoveries"] == 1
            after = engine.roles()
            assert {role for role in before if before[role] != after[role]} == {"worker-0"}

    asyncio.run(main())
    assert "worker 0 is back after" in engine.stderr


def test_streams_go_on_after_a_rank_was_stopped(engine: Server) -> None:
    async def main() -> None:
        bodies = [request_of(number) for number in range(4)]
        async with client_of(engine) as client:
            alone = [await client.complete(body) for body in bodies]  # and how long steps take gets known
            _, before = await client.get("/health/progress")
            stopped = engine.child("worker")
            streams = [asyncio.create_task(client.complete(body)) for body in bodies]
            await client.all_running(len(streams))
            stopped.send_signal(signal.SIGSTOP)
            for answer, expected in zip(await asyncio.gather(*streams), alone, strict=True):
                assert_same(answer, expected)
            assert not is_alive(stopped)
            progress = await client.until("/health/progress", lambda status, body: body["running"] == 0)
            assert progress["recoveries"] == before["recoveries"] + 1

    asyncio.run(main())
    assert re.search(r"worker 0 was killed because it hangs: no result of step \d+ within \S+ s", engine.stderr)


@pytest.mark.parametrize("victim", ["tokenizer-0", "scheduler-0", "frontend-0"])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_requests_behind_another_dead_process_hear_of_it_and_the_next_one_is_served(
    engine: Server, victim: str, number: signal.Signals
) -> None:
    """B089. A stopped process is one that hangs."""

    async def main() -> None:
        async with client_of(engine) as client:
            await client.until("/health/ready", lambda status, _: status == 200)
            await client.served_again()
            finished = await client.finished()
            assert finished > 0
            before = engine.roles()
            bodies = [request_of(number, max_tokens=2000) for number in range(4)]
            streams = [asyncio.create_task(client.complete(body)) for body in bodies]
            await client.all_running(len(streams))
            before[victim].send_signal(number)
            if victim != "frontend-0":
                await client.until("/health/ready", lambda status, _: status == 503)
            async with asyncio.timeout(10 if number == signal.SIGKILL else 40):
                for answer in await asyncio.gather(*streams):
                    assert not answer.done
                    if victim == "frontend-0":
                        assert answer.broken
                    else:
                        assert answer.error is not None
                        assert answer.error["type"] == "server_error"
            for answer in await client.served_again():
                if answer.status == 503:
                    assert "Retry-After" in answer.headers
                else:
                    # Its connection broke, or it was accepted just before the loss was noticed.
                    assert answer.broken or answer.error["type"] == "server_error"
            await client.until("/health/ready", lambda status, _: status == 200)
            # Nothing is left of the requests that nobody waits for any more.
            await client.until(
                "/health/progress",
                lambda status, body: status == 200 and body["running"] == 0 and body["kv_blocks"]["private"] == 0,
            )
            assert await client.finished() == finished + 1, "a dead frontend's counts stay, what failed does not count"
            after = engine.roles()
            replaced = {role for role in before if before[role] != after[role]}
            assert replaced == ({"scheduler-0", "worker-0"} if victim == "scheduler-0" else {victim})

    asyncio.run(main())
    assert "Traceback" not in engine.stderr


@pytest.mark.slow
def test_a_killed_rank_of_three_takes_the_others_with_it_and_all_come_back(model_path: Path) -> None:
    async def main(server: Server) -> None:
        bodies = [request_of(number, max_tokens=64) for number in range(2)]
        async with client_of(server) as client:
            alone = [await client.complete(body) for body in bodies]
            before = server.roles()
            streams = [asyncio.create_task(client.complete(body)) for body in bodies]
            await client.all_running(len(streams))
            before["worker-1"].send_signal(signal.SIGKILL)
            for answer, expected in zip(await asyncio.gather(*streams), alone, strict=True):
                assert_same(answer, expected)
            await client.until("/health/ready", lambda status, _: status == 200)
            after = server.roles()
            replaced = {role for role in before if before[role] != after[role]}
            assert replaced == {"worker-0", "worker-1", "worker-2"}
            assert not any(is_alive(before[role]) for role in replaced)

    with Server(model_path, *SMALL, "--tp", "3") as server:
        asyncio.run(main(server))
        assert server.stderr.count("was killed by signal") == 1


def test_ranks_that_do_not_come_back_fail_every_request_and_the_exit_status(model_path: Path) -> None:
    async def main(server: Server) -> list[Answer]:
        async with client_of(server) as client:
            streams = [asyncio.create_task(client.complete(request_of(n, max_tokens=2000))) for n in range(4)]
            await client.all_running(len(streams))
            server.roles()["worker-0"].send_signal(signal.SIGKILL)
            async with asyncio.timeout(30):
                return await asyncio.gather(*streams)

    # Loading the code alone takes longer.
    server = Server(model_path, *SMALL, "--recovery-timeout", "1")
    for answer in asyncio.run(main(server)):
        assert not answer.done
        assert answer.error is not None
        assert "was not back within --recovery-timeout 1 seconds" in answer.error["message"]
    assert server.wait(10) == 1
    assert server.survivors(5) == []


@pytest.mark.slow
def test_twenty_kills_of_a_worker_at_random_moments_under_sixteen_streams(engine: Server) -> None:
    kills, streams, chooser = 20, 16, random.Random(8)
    bodies = [request_of(number, max_tokens=40 + 5 * (number % 16), words=number % 6) for number in range(2 * streams)]
    killed: list[float] = []
    answers: list[tuple[int, Answer]] = []

    async def stream(client: Client, number: int, over: asyncio.Event) -> None:
        turn = 0
        while not over.is_set():
            which = number + streams * (turn % 2)
            answers.append((which, await client.complete(bodies[which])))
            turn += 1

    async def main() -> list[Answer]:
        async with client_of(engine) as client:
            over = asyncio.Event()
            tasks = [asyncio.create_task(stream(client, number, over)) for number in range(streams)]
            for _ in range(kills):
                await client.until("/health/ready", lambda status, _: status == 200)
                _, progress = await client.get("/health/progress")
                # The first steps compute the prompts again, the further ones decode.
                moment = progress["step"] + chooser.randrange(40)
                await client.until("/health/progress", lambda _, body, step=moment: body["step"] >= step)
                worker = engine.child("worker")
                killed.append(time.perf_counter())
                worker.send_signal(signal.SIGKILL)
                await client.until("/health/ready", lambda status, _: status == 503)
            await client.until("/health/ready", lambda status, _: status == 200)
            over.set()
            await asyncio.gather(*tasks)
            return [await client.complete(body) for body in bodies]

    alone = asyncio.run(main())
    for which, answer in answers:
        assert_same(answer, alone[which])
    gaps = []
    for moment in killed:
        silences = []
        for _, answer in answers:
            before = [at for at in answer.arrivals if at <= moment]
            after = [at for at in answer.arrivals if at > moment]
            if before and after:
                silences.append(min(after) - max(before))
        gaps.append(max(silences, default=0.0))  # none: killed before any stream had begun
    print(
        f"\n{kills} kills under {streams} streams, {len(answers)} requests, all as alone. Longest time without tokens "
        f"of any stream: median {statistics.median(gaps):.1f} s, worst {max(gaps):.1f} s"
    )
