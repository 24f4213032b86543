"""When the SDK's clients send a request again, and when they do not."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from ipc import (
    AsyncClient,
    BadRequest,
    Conflict,
    ConnectionLost,
    DeadlineExceeded,
    Overloaded,
    RequestFailed,
    ServerError,
    Unavailable,
)
from ipc import calls as calls_module
from ipc.messages import Failed, Paused, Welcome
from tests.unit.ipc.fake_tokenizer import MODEL, FakeTokenizer
from tests.unit.ipc.test_channels import until
from tests.unit.ipc.test_client import BUSY, PATIENCE, run

FULL_FOR_EVER = Failed(0, 429, "busy", "rate_limit_error")
AWAY = Failed(0, 503, "away", "server_error", code="engine_unavailable", retry_after=1.0)
BROKEN = Failed(0, 500, "broken", "server_error")
IN_USE = Failed(0, 409, "in use", "conflict_error", "idempotency_key", "idempotency_key_in_use", 0.01)
USED = Failed(0, 409, "gone", "conflict_error", "idempotency_key", "idempotency_key_used")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "_FIRST_PAUSE", 0.002)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/tokenizer"


@pytest.mark.parametrize("failure", [BUSY, AWAY], ids=lambda failure: str(failure.status))
def test_a_refused_request_is_sent_again_under_one_key(endpoint: str, failure: Failed) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tokenizer.refusals = [failure, failure]
        answer = await client.generate("a")
        assert (answer.text, answer.attempts) == ("a", 3)
        keys = {asked.idempotency_key for asked in tokenizer.asked}
        assert len(keys) == 1
        assert "" not in keys
        assert len({asked.request_id for asked in tokenizer.asked}) == 3
        await client.generate("a")
        assert tokenizer.asked[-1].idempotency_key not in keys

    run(endpoint, body)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(BUSY, Overloaded), (AWAY, Unavailable), (BROKEN, ServerError), (FULL_FOR_EVER, Overloaded), (IN_USE, Conflict)],
    ids=["busy", "away", "broken", "full for ever", "in use"],
)
def test_off_means_off_and_what_is_not_safe_is_not_sent_again(
    endpoint: str, failure: Failed, kind: type[RequestFailed]
) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tokenizer.refusals = [failure]
        retries = 0 if failure in (BUSY, AWAY) else 3
        with pytest.raises(kind) as caught:
            await client.generate("a", retries=retries)
        assert (caught.value.status, caught.value.message) == (failure.status, failure.message)
        assert len(tokenizer.asked) == 1
        assert bool(tokenizer.asked[0].idempotency_key) == bool(retries)

    run(endpoint, body)


def test_the_number_of_retries_is_a_bound(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tokenizer.refusals = [BUSY] * 10
        with pytest.raises(Overloaded) as caught:
            await client.generate("a", retries=3)
        assert caught.value.retry_after == 0.01
        assert len(tokenizer.asked) == 4

    run(endpoint, body)


def test_nothing_is_sent_again_once_something_has_come(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        texts = []
        with pytest.raises(BadRequest, match="prompt: no"):
            async for chunk in client.stream("fail"):
                texts.append(chunk.text)
        assert texts == ["part"]
        assert len(tokenizer.asked) == 1

    run(endpoint, body)


def test_a_key_in_use_is_waited_for_by_the_call_that_used_it(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tokenizer.refusals = [AWAY, IN_USE]
        answer = await client.generate("a", idempotency_key="mine")
        assert answer.attempts == 3
        assert {asked.idempotency_key for asked in tokenizer.asked} == {"mine"}

    run(endpoint, body)


def running_for(retry_after: float) -> Failed:
    return Failed(0, 409, "in use", "conflict_error", "idempotency_key", "idempotency_key_in_use", retry_after)


def test_a_key_in_use_is_waited_for_longer_than_there_are_retries(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tokenizer.refusals = [AWAY, *[running_for(0.005)] * 20, AWAY]
        answer = await client.generate("a", retries=2)
        assert (answer.text, answer.attempts) == ("a", 23)

    run(endpoint, body)


@pytest.mark.parametrize("failure", [running_for(1000.0), replace(BUSY, retry_after=1000.0)], ids=["in use", "busy"])
def test_nothing_is_sent_before_the_server_wants_it_nor_waited_for_beyond_the_deadline(
    endpoint: str, failure: Failed
) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tokenizer.refusals = [AWAY, failure]
        with pytest.raises(RequestFailed) as caught:
            await client.generate("a", idempotency_key="mine", deadline=30, retries=100)
        assert caught.value.status == failure.status
        assert len(tokenizer.asked) == 2
        tokenizer.refusals = [AWAY, failure]
        waiting = asyncio.create_task(client.generate("a", idempotency_key="mine"))
        await until(lambda: not tokenizer.refusals)
        await asyncio.sleep(0.1)  # many times its own pauses
        assert len(tokenizer.asked) == 4
        waiting.cancel()

    run(endpoint, body)


def test_a_key_in_use_is_waited_for_until_the_deadline(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tokenizer.refusals = [AWAY, *[running_for(0.01)] * 1000]
        with pytest.raises((Conflict, DeadlineExceeded)):
            await client.generate("a", deadline=0.3, retries=1)
        assert len(tokenizer.asked) > 3
        assert tokenizer.refusals

    run(endpoint, body)


def test_an_answer_that_is_gone_is_not_waited_for(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tokenizer.refusals = [AWAY, USED]
        with pytest.raises(Conflict, match="gone"):
            await client.generate("a", idempotency_key="mine", retries=5)
        assert len(tokenizer.asked) == 2

    run(endpoint, body)


def test_calls_go_on_with_the_successor_of_a_lost_server(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        async with asyncio.timeout(PATIENCE), AsyncClient(endpoint) as client:
            waiting = [asyncio.create_task(client.generate("hang")) for _ in range(20)]
            impatient = asyncio.create_task(client.generate("hang", retries=0))
            await until(lambda: len(tokenizer.asked) == 21)
            tokenizer.router.close()
            with pytest.raises(ConnectionLost):
                await impatient
            late = [asyncio.create_task(client.generate("a b")) for _ in range(5)]
            await asyncio.sleep(0.05)
            successor = FakeTokenizer(endpoint)
            assert {(await task).text for task in late} == {"ab"}
            await until(lambda: len(successor.asked) == 25)
            keys = {asked.idempotency_key for asked in tokenizer.asked} - {""}
            assert len(keys & {asked.idempotency_key for asked in successor.asked}) == 20
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        successor.router.close()

    asyncio.run(main())


def test_a_call_waits_while_the_server_is_paused(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        (peer,) = tokenizer.router._inbound
        tokenizer.router.send(peer, Paused("the engine is shutting down"))
        tokenizer.refusals = [AWAY]
        waiting = asyncio.create_task(client.generate("a", retries=1))
        await until(lambda: len(tokenizer.asked) == 1)
        await asyncio.sleep(0.05)
        assert len(tokenizer.asked) == 1
        tokenizer.router.send(peer, Welcome(MODEL))
        assert (await waiting).attempts == 2

    run(endpoint, body)


def test_what_was_not_sent_is_no_attempt(endpoint: str) -> None:
    """The server comes after the call, or has gone before it."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            client = AsyncClient(endpoint)
            waiting = asyncio.create_task(client.generate("a"))
            await asyncio.sleep(0.05)
            tokenizer = FakeTokenizer(endpoint)
            assert (await waiting).attempts == 1
            tokenizer.router.close()
            await until(lambda: client.model is None)
            waiting = asyncio.create_task(client.generate("b"))
            await asyncio.sleep(0.05)
            tokenizer = FakeTokenizer(endpoint)
            assert (await waiting).attempts == 1
            await client.close()
            tokenizer.router.close()

    asyncio.run(main())


def test_to_connect_is_no_attempt(endpoint: str) -> None:
    """Nobody has called `connect`, and nothing may be tried twice."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            tokenizer = FakeTokenizer(endpoint)
            for ask in (lambda client: client.generate("a", deadline=5.0), lambda client: client.tokenize("ab")):
                client = AsyncClient(endpoint, retries=0)
                await ask(client)
                await client.close()
            tokenizer.router.close()
            client = AsyncClient(endpoint + "-nobody", retries=0)
            with pytest.raises(DeadlineExceeded):
                await client.generate("a", deadline=0.05)
            await client.close()

    asyncio.run(main())


def test_questions_are_asked_again(endpoint: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            client = AsyncClient(endpoint)
            waiting = asyncio.create_task(client.tokenize("ab"))
            await asyncio.sleep(0.05)
            tokenizer = FakeTokenizer(endpoint)
            assert (await waiting).token_ids == (97, 98)
            await client.close()
            tokenizer.router.close()

    asyncio.run(main())
