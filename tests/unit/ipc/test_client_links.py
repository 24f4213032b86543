"""The SDK's clients and several tokenizer processes, or several addresses: who gets a call, and when one is away."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from ipc import AsyncClient, ConnectionLost, DeadlineExceeded, RequestFailed, Unavailable
from ipc import calls as calls_module
from ipc.engine_client import EngineClient, Route
from ipc.messages import Failed, SamplingParams, TextPrompt
from ipc.stream import Stream
from tests.unit.ipc.fake_tokenizer import FakeTokenizer
from tests.unit.ipc.test_channels import until

PATIENCE = 20.0  # seconds; only reached when something is broken
AWAY = Failed(0, 503, "away", "server_error", code="engine_unavailable", retry_after=1.0)
BUSY = Failed(0, 429, "busy", "rate_limit_error", code="queue_full", retry_after=0.01)
IN_USE = Failed(0, 409, "in use", "conflict_error", "idempotency_key", "idempotency_key_in_use", 0.01)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "_FIRST_PAUSE", 0.002)


@pytest.fixture
def endpoints(tmp_path: Path) -> list[str]:
    return [f"ipc://{tmp_path}/tokenizer-{index}" for index in range(2)]


@contextlib.asynccontextmanager
async def serving(*endpoints: str) -> AsyncIterator[list[FakeTokenizer]]:
    """A tokenizer at each; a test may end one of them before."""
    tokenizers = [FakeTokenizer(endpoint) for endpoint in endpoints]
    try:
        yield tokenizers
    finally:
        for tokenizer in tokenizers:
            if not tokenizer.router._io.socket.closed:
                tokenizer.router.close()


@contextlib.asynccontextmanager
async def connected(addresses: Sequence[str], ready: int) -> AsyncIterator[AsyncClient]:
    """A client when so many of its links take requests."""
    async with asyncio.timeout(PATIENCE), AsyncClient(addresses) as client:
        await until(lambda: sum(link.taking for link in client._engine._links) == ready)
        yield client


def keys_of(tokenizer: FakeTokenizer) -> set[str]:
    return {asked.idempotency_key for asked in tokenizer.asked}


def own_key(index: int, links: int = 2) -> str:
    """A key that belongs to this link."""
    return next(key for key in map(str, range(1000)) if zlib.crc32(key.encode()) % links == index)


async def cancel(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- calls without a key of the caller ---


def test_calls_go_to_the_link_with_the_least_to_do(endpoints: list[str]) -> None:
    async def main() -> None:
        async with serving(*endpoints) as tokenizers, connected(endpoints, ready=2) as client:
            tasks = [asyncio.create_task(client.generate("hang")) for _ in range(20)]
            await until(lambda: client.live_requests == 20)
            await until(lambda: [len(tokenizer.asked) for tokenizer in tokenizers] == [10, 10])
            assert not keys_of(tokenizers[0]) & keys_of(tokenizers[1])
            await cancel(tasks)

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_address_that_is_wrong_for_ever_harms_no_call(endpoints: list[str], wrong: int) -> None:
    async def main() -> None:
        async with serving(endpoints[1 - wrong]) as (tokenizer,), connected(endpoints, ready=1) as client:
            answers = await asyncio.gather(*(client.generate("a b") for _ in range(20)))
            assert [(answer.text, answer.attempts) for answer in answers] == [("ab", 1)] * 20
            assert len(keys_of(tokenizer)) == 20
            assert (await client.embed("a")).attempts == 1
            assert (await client.score("ab")).token_ids == (1, 2)
            assert (await client.tokenize("ab")).token_ids == (97, 98)

    asyncio.run(main())


@pytest.mark.parametrize("away", [0, 1])
def test_calls_go_on_elsewhere_while_one_process_is_away_and_come_back(endpoints: list[str], away: int) -> None:
    async def main() -> None:
        async with serving(*endpoints) as tokenizers, connected(endpoints, ready=2) as client:
            stays, goes = tokenizers[1 - away], tokenizers[away]
            running = [asyncio.create_task(client.generate("hang")) for _ in range(20)]
            await until(lambda: len(goes.asked) == len(stays.asked) == 10)
            goes.router.close()
            # What ran there is sent again under the same keys; nobody waits for it to be back.
            await until(lambda: len(stays.asked) == 20)
            assert keys_of(goes) < keys_of(stays)
            answers = await asyncio.gather(*(client.generate("a b") for _ in range(20)))
            assert [(answer.text, answer.attempts) for answer in answers] == [("ab", 1)] * 20
            async with serving(endpoints[away]) as (successor,):
                await until(lambda: all(link.taking for link in client._engine._links))
                # The other one has twenty requests to do, so whatever comes now is for this one.
                assert (await client.generate("c")).text == "c"
                assert len(successor.asked) == 1
                await cancel(running)

    asyncio.run(main())


def test_calls_wait_while_all_are_away(endpoints: list[str]) -> None:
    async def main() -> None:
        async with serving(*endpoints) as tokenizers, connected(endpoints, ready=2) as client:
            for tokenizer in tokenizers:
                tokenizer.router.close()
            await until(lambda: client.model is None)
            waiting = [asyncio.create_task(client.generate("a")) for _ in range(10)]
            await asyncio.sleep(0.05)
            async with serving(endpoints[1]):
                assert [answer.text for answer in await asyncio.gather(*waiting)] == ["a"] * 10

    asyncio.run(main())


@pytest.mark.parametrize("refusal", [AWAY, BUSY], ids=["away", "busy"])
def test_what_one_process_refuses_is_sent_to_another(endpoints: list[str], refusal: Failed) -> None:
    async def main() -> None:
        async with serving(*endpoints) as tokenizers, connected(endpoints, ready=2) as client:
            tokenizers[0].refusals = [refusal] * 100
            answer = await client.generate("a", retries=1)
            assert (answer.text, answer.attempts) == ("a", 2)
            assert keys_of(tokenizers[0]) == keys_of(tokenizers[1])

    asyncio.run(main())


# --- attempts that a process may know of ---


@contextlib.asynccontextmanager
async def engine_of(endpoints: Sequence[str]) -> AsyncIterator[tuple[list[FakeTokenizer], EngineClient]]:
    async with asyncio.timeout(PATIENCE), serving(*endpoints) as tokenizers:
        client = EngineClient(endpoints)
        await client.connect()
        await until(lambda: all(link.taking for link in client._links))
        yield tokenizers, client
        await client.close()


async def failure_of(stream: Stream) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        _ = [batch async for batch in stream]
    return caught.value


def test_after_a_lost_session_the_next_attempt_asks_the_same_process_if_it_is_there(endpoints: list[str]) -> None:
    """It may have the answer already, or still work on it."""

    async def main() -> None:
        async with engine_of(endpoints) as ((first, second), client):
            route = Route()
            stream = client.generate(TextPrompt("hang"), SamplingParams(), route=route, idempotency_key="auto")
            await until(lambda: len(first.asked) == 1)
            (peer,) = first.router._inbound
            first.router._cut_off(peer, "a test")
            error = await failure_of(stream)
            assert isinstance(error, ConnectionLost)
            route.failed(error)
            await until(lambda: all(link.taking for link in client._links))
            # It has more to do than the other one, and is asked all the same.
            client.generate(TextPrompt("hang"), SamplingParams())
            await until(lambda: len(first.asked) == 2)
            first.refusals = [IN_USE]
            again = client.generate(TextPrompt("a"), SamplingParams(), route=route, idempotency_key="auto")
            route.failed(await failure_of(again))
            assert [len(first.asked), len(second.asked)] == [3, 0]
            # Still worked on: it is the one to ask again.
            last = client.generate(TextPrompt("a"), SamplingParams(), route=route, idempotency_key="auto")
            assert [batch async for batch in last]
            assert [len(first.asked), len(second.asked)] == [4, 0]

    asyncio.run(main())


def test_after_a_lost_connection_the_next_attempt_asks_another_process_if_it_has_to(endpoints: list[str]) -> None:
    async def main() -> None:
        async with engine_of(endpoints) as ((first, second), client):
            route = Route()
            stream = client.generate(TextPrompt("hang"), SamplingParams(), route=route, idempotency_key="auto")
            await until(lambda: len(first.asked) == 1)
            first.router.close()
            route.failed(await failure_of(stream))
            again = client.generate(TextPrompt("a"), SamplingParams(), route=route, idempotency_key="auto")
            assert [batch async for batch in again]
            assert keys_of(second) == {"auto"}

    asyncio.run(main())


# --- calls with a key of the caller ---


@pytest.mark.parametrize("index", [0, 1])
def test_a_key_of_the_callers_own_goes_to_the_same_process_from_every_client(endpoints: list[str], index: int) -> None:
    async def main() -> None:
        async with (
            serving(*endpoints) as tokenizers,
            connected(endpoints, ready=2) as client,
            connected(endpoints, ready=2) as other,
        ):
            busy = [asyncio.create_task(client.generate("hang")) for _ in range(5)]
            await until(lambda: client.live_requests == 5)
            for asking in (client, other, client):
                await asking.generate("a", idempotency_key=own_key(index))
            asked = [asked.idempotency_key for asked in tokenizers[index].asked]
            assert asked.count(own_key(index)) == 3
            assert own_key(index) not in keys_of(tokenizers[1 - index])
            await cancel(busy)

    asyncio.run(main())


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("running", [False, True], ids=["begun while it is away", "running when it goes"])
def test_a_key_of_the_callers_own_waits_for_its_process(endpoints: list[str], index: int, running: bool) -> None:
    async def main() -> None:
        async with serving(*endpoints) as tokenizers, connected(endpoints, ready=2) as client:
            key = own_key(index)
            other, goes = tokenizers[1 - index], tokenizers[index]
            if not running:
                goes.router.close()
                await until(lambda: sum(link.taking for link in client._engine._links) == 1)
            waiting = asyncio.create_task(client.generate("hang" if running else "a", idempotency_key=key, retries=1))
            if running:
                await until(lambda: len(goes.asked) == 1)
                goes.router.close()
            # Far longer than its pauses: it would have been sent elsewhere by now, or have failed.
            await asyncio.sleep(0.3)
            assert not waiting.done()
            assert not other.asked
            assert (await client.generate("b")).text == "b"
            async with serving(endpoints[index]) as (successor,):
                await until(lambda: keys_of(successor) == {key})
                assert key not in keys_of(other)
                if not running:
                    assert (await waiting).text == "a"
                await cancel([waiting])

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_key_whose_process_never_comes_waits_until_the_deadline(
    endpoints: list[str], wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(endpoints[1 - wrong]) as (tokenizer,), connected(endpoints, ready=1) as client:
            key = own_key(wrong)
            with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
                await client.generate("a", idempotency_key=key, deadline=0.3)
            with pytest.raises(Unavailable, match="the process that knows the idempotency key is not ready"):
                await client.generate("a", idempotency_key=key, retries=0)
            monkeypatch.setattr(calls_module, "_AWAY_SECONDS", 0.1)
            with pytest.raises(Unavailable, match="the process that knows the idempotency key is not ready"):
                await client.generate("a", idempotency_key=key)
            assert not tokenizer.asked
            assert (await client.generate("a", idempotency_key=own_key(1 - wrong))).attempts == 1

    asyncio.run(main())


def test_closing_the_client_ends_a_call_that_waits_for_its_process(endpoints: list[str]) -> None:
    async def main() -> None:
        async with serving(endpoints[0]), connected(endpoints, ready=1) as client:
            waiting = asyncio.create_task(client.generate("a", idempotency_key=own_key(1)))
            await asyncio.sleep(0.05)
            await client.close()
            with pytest.raises(RequestFailed) as caught:
                await waiting
            assert caught.value.status == 499

    asyncio.run(main())
