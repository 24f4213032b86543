"""The SDK's clients against a scripted tokenizer process on a real socket."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ipc import (
    AsyncClient,
    BadRequest,
    Cancelled,
    Client,
    Conflict,
    DeadlineExceeded,
    Overloaded,
    RequestFailed,
    ServerError,
    Unavailable,
)
from ipc import calls as calls_module
from ipc.errors import AuthenticationFailed, error_of
from ipc.messages import ChatMessage, ChatPrompt, Failed, SamplingParams, TextPrompt, TokenPrompt
from tests.unit.ipc.fake_tokenizer import MODEL, FakeTokenizer, served
from tests.unit.ipc.test_channels import until

PATIENCE = 10.0  # seconds; only reached when something is broken
BUSY = Failed(0, 429, "busy", "rate_limit_error", code="queue_full", retry_after=0.01)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "_FIRST_PAUSE", 0.002)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/tokenizer"


@contextlib.asynccontextmanager
async def connected(endpoint: str, **options: Any) -> AsyncIterator[tuple[FakeTokenizer, AsyncClient]]:
    tokenizer = FakeTokenizer(endpoint)
    try:
        async with AsyncClient(endpoint, **options) as client:
            yield tokenizer, client
    finally:
        tokenizer.router.close()


def run(endpoint: str, body: Callable[[FakeTokenizer, AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE), connected(endpoint, **options) as (tokenizer, client):
            await body(tokenizer, client)

    asyncio.run(main())


def test_each_kind_of_prompt_and_each_way_to_sample_reaches_the_engine(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        await client.generate("a b", max_tokens=5)
        await client.generate([3, 4], SamplingParams(max_tokens=5, top_k=2), temperature=0)
        await client.generate([{"role": "user", "content": "Hi"}], tenant="team", priority=-2)
        text, ids, chat = tokenizer.asked
        assert (text.prompt, text.params) == (TextPrompt("a b"), SamplingParams(max_tokens=5))
        assert (ids.prompt, ids.params.top_k) == (TokenPrompt(b"\3\0\0\0\4\0\0\0"), 2)
        assert ids.params.temperature == 0
        assert chat.prompt == ChatPrompt((ChatMessage("user", "Hi"),))
        assert (chat.tenant, chat.priority, chat.deadline) == ("team", -2, None)

    run(endpoint, body)


def test_a_completion_has_all_choices_and_counts(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        answer = await client.generate("a b c", n=2, return_prompt=True)
        assert [(choice.index, choice.text, choice.token_ids) for choice in answer.choices] == [
            (0, "abc", (0, 0, 0)),
            (1, "abc", (0, 0, 0)),
        ]
        assert (answer.text, answer.finish_reason, answer.attempts) == ("abc", "stop", 1)
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.total_tokens) == (3, 6, 0, 9)
        assert answer.prompt is not None
        assert (answer.prompt.token_ids, answer.prompt.text) == ((1, 2), "ab")

    run(endpoint, body)


def test_a_stream_is_the_completion_in_pieces(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        stream = client.stream("a b c", n=2)
        chunks = [chunk async for chunk in stream]
        whole = await stream.completion()
        for choice in whole.choices:
            mine = [chunk for chunk in chunks if chunk.index == choice.index]
            assert "".join(chunk.text for chunk in mine) == choice.text
            assert [chunk.finish_reason for chunk in mine] == [None, None, None, "stop"]
        assert tokenizer.aborted == []

    run(endpoint, body)


def test_embeddings_scores_and_tokens(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        embedding = await client.embed("a")
        assert list(embedding.vector) == pytest.approx([0.6, 0.8])
        assert (embedding.usage.prompt_tokens, embedding.attempts) == (3, 1)
        assert tokenizer.asked[-1].pooling == MODEL.pooling
        score = await client.score("ab", top=2)
        assert (score.token_ids, score.positions, score.logprob) == ((1, 2), (), 0)
        for top in (-1, 21, True, None):
            with pytest.raises(BadRequest, match="top must be an integer between 0 and 20") as caught:
                await client.score("ab", top=top)  # type: ignore[arg-type]
            assert caught.value.failed.param == "top"
        assert tokenizer.asked[-1].params == SamplingParams(max_tokens=0, prompt_logprobs=2)
        tokens = await client.tokenize("hé")
        assert (tokens.token_ids, tokens.token_strs) == ((104, 233), ("h", "é"))
        assert await client.detokenize(tokens.token_ids) == "hé"
        with pytest.raises(BadRequest, match="token ids already"):
            await client.tokenize([1])
        with pytest.raises(BadRequest, match="32 bits"):
            await client.detokenize([2**40])

    run(endpoint, body)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 100}, "max_tokens"),
        ({"deadline": -1}, "deadline"),
        ({"deadline": "soon"}, "deadline"),
        ({"retries": -1}, "retries"),
        ({"retries": True}, "retries"),
        ({"idempotency_key": "k" * 129}, "idempotency_key"),
        ({"priority": 1.5}, "priority"),
    ],
    ids=repr,
)
def test_bounds_are_the_same_as_over_http_and_nothing_is_sent(
    endpoint: str, options: dict[str, Any], param: str
) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        with pytest.raises(BadRequest) as caught:
            await client.generate("a", **options)
        assert caught.value.param == param
        assert not tokenizer.asked
        assert (await client.generate("a")).text == "a"

    run(endpoint, body)


def test_a_prompt_too_large_for_the_connection_is_refused_here(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        large = "x" * (16 << 20) + "x"
        for prompt, param in ((large, "prompt"), ([{"role": "user", "content": large}], "messages")):
            with pytest.raises(BadRequest, match="at most 16777216 bytes") as caught:
                await client.generate(prompt)  # type: ignore[arg-type]
            assert caught.value.param == param
        assert not tokenizer.asked

    run(endpoint, body)


def test_an_unknown_keyword_is_a_type_error(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        with pytest.raises(TypeError, match="urgency"):
            await client.generate("a", urgency=1)  # type: ignore[call-arg]

    run(endpoint, body)


# --- ends ---


def test_leaving_the_loop_aborts(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        running = client.stream("a b c hang", n=2)
        async for _ in running:
            break
        await until(lambda: client.live_requests == 0)
        with pytest.raises(Cancelled):
            await running.completion()

    run(endpoint, body)


def test_abort_and_the_end_of_the_block_abort(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        stream = client.stream("hang")
        waiting = asyncio.create_task(stream.completion())
        await until(lambda: len(tokenizer.asked) == 1)
        stream.abort()
        with pytest.raises(Cancelled):
            await waiting
        await until(lambda: len(tokenizer.aborted) == 1)
        async with client.stream("hang") as other:
            waiting = asyncio.create_task(other.completion())
            await until(lambda: len(tokenizer.asked) == 2)
        with pytest.raises(Cancelled):
            await waiting
        await until(lambda: len(tokenizer.aborted) == 2)

    run(endpoint, body)


def test_a_cancelled_task_aborts_its_request_and_no_other(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tasks = [asyncio.create_task(client.generate("hang")) for _ in range(3)]
        await until(lambda: len(tokenizer.asked) == 3)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        await until(lambda: tokenizer.aborted == [tokenizer.asked[1].request_id])
        assert client.live_requests == 2
        for task in tasks:
            task.cancel()

    run(endpoint, body)


def test_closing_the_client_ends_whatever_waits(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = AsyncClient(endpoint)
        await client.connect()
        absent = AsyncClient(endpoint + "-nobody")
        waits: list[Awaitable[object]] = [
            client.generate("hang"),
            client.embed("hang"),
            client.tokenize("hang"),
            absent.generate("a"),
            absent.connect(),
        ]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await until(lambda: len(tokenizer.asked) == 2)
        await asyncio.sleep(0.05)
        await client.close()
        await absent.close()
        async with asyncio.timeout(PATIENCE):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [Cancelled] * len(tasks)
        with pytest.raises(Cancelled):
            await client.generate("a", retries=1)
        tokenizer.router.close()

    asyncio.run(main())


# --- deadlines ---


def test_a_deadline_ends_the_call_and_aborts_the_request(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await client.generate("hang", deadline=0.05)
        (asked,) = tokenizer.asked
        assert asked.deadline is not None
        assert 0 < asked.deadline <= 0.05
        await until(lambda: tokenizer.aborted == [asked.request_id])
        with pytest.raises(DeadlineExceeded):
            await client.embed("hang", deadline=0.05)
        with pytest.raises(DeadlineExceeded):
            await client.tokenize("hang", deadline=0.05)
        with pytest.raises(DeadlineExceeded):
            _ = [chunk async for chunk in client.stream("hang", deadline=0.05)]
        assert client.live_requests == 0

    run(endpoint, body)


def test_the_clients_own_deadline_is_for_calls_that_do_not_say(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        with pytest.raises(DeadlineExceeded):
            await client.generate("hang")
        await client.generate("a", deadline=30)
        await client.generate("a", deadline=None)
        assert tokenizer.asked[1].deadline == pytest.approx(30, abs=5)
        assert tokenizer.asked[2].deadline is None

    run(endpoint, body, deadline=0.05)


def test_a_deadline_bounds_all_attempts_together(endpoint: str) -> None:
    async def body(tokenizer: FakeTokenizer, client: AsyncClient) -> None:
        tokenizer.refusals = [BUSY] * 1000
        with pytest.raises((Overloaded, DeadlineExceeded)):
            await client.generate("a", deadline=0.1, retries=100)
        assert tokenizer.refusals
        deadlines = [asked.deadline for asked in tokenizer.asked if asked.deadline is not None]
        assert len(deadlines) == len(tokenizer.asked)
        assert deadlines == sorted(deadlines, reverse=True)

    run(endpoint, body)


def test_no_server_within_the_deadline(endpoint: str) -> None:
    async def main() -> None:
        client = AsyncClient(endpoint)
        with pytest.raises(Unavailable, match=r"within 0\.05 s"):
            await client.connect(0.05)
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await client.generate("a", deadline=0.1)
        with pytest.raises(Unavailable):
            await client.generate("a", retries=0)
        await client.close()

    asyncio.run(main())


# --- errors ---


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, AuthenticationFailed),
        (404, BadRequest),
        (408, DeadlineExceeded),
        (409, Conflict),
        (429, Overloaded),
        (499, Cancelled),
        (500, ServerError),
        (503, Unavailable),
    ],
)
def test_a_status_has_its_error(status: int, kind: type[RequestFailed]) -> None:
    error = error_of(Failed(1, status, "why", "type", "param", "code", 2.5))
    assert type(error) is kind
    assert (error.status, error.message, error.param, error.code, error.retry_after) == (
        status,
        "why",
        "param",
        "code",
        2.5,
    )
    assert str(error) == "why"


# --- blocking ---


def test_the_blocking_client_does_the_same(endpoint: str) -> None:
    with served(endpoint) as tokenizer, Client(endpoint, timeout=5) as client:
        assert client.model == MODEL
        assert client.generate("x y", n=2).choices[1].text == "xy"
        assert [chunk.text for chunk in client.stream("x y")] == ["x", "y", ""]
        assert list(client.embed("a").vector) == pytest.approx([0.6, 0.8])
        assert client.score("ab").token_ids == (1, 2)
        assert client.detokenize(client.tokenize("ab").token_ids) == "ab"
        with pytest.raises(BadRequest, match="priority must be between"):
            client.generate("x", priority=-1_000_001)
        with pytest.raises(BadRequest, match="prompt: no"):
            client.generate("fail")
        with pytest.raises(DeadlineExceeded):
            client.generate("hang", deadline=0.05)
        assert tokenizer.asked


def test_leaving_a_blocking_stream_early_aborts_it(endpoint: str) -> None:
    with served(endpoint) as tokenizer, Client(endpoint, timeout=5) as client:
        for _ in client.stream("a b c", n=2):
            break
        assert client.generate("z").text == "z"
        stream = client.stream("hang")
        ended: list[object] = []

        def follow() -> None:
            try:
                ended.extend(stream)
            except RequestFailed as error:
                ended.append(type(error))

        thread = threading.Thread(target=follow)
        thread.start()
        while len(tokenizer.asked) < 3:
            pass
        stream.abort()
        thread.join(PATIENCE)
        assert ended == [Cancelled]


def test_closing_a_blocking_client_ends_the_calls_of_other_threads(endpoint: str) -> None:
    with served(endpoint) as tokenizer:
        client = Client(endpoint, timeout=5)
        tokenizer.refusals = [Failed(0, 429, "busy", "rate_limit_error", retry_after=3600.0)]
        ended: list[type[BaseException]] = []

        def call(prompt: str) -> None:
            try:
                client.generate(prompt)
            except RequestFailed as error:
                ended.append(type(error))

        threads = [threading.Thread(target=call, args=(prompt,)) for prompt in ("a", "hang", "hang")]
        for thread in threads:
            thread.start()
        while len(tokenizer.asked) < 3:
            pass
        client.close()
        for thread in threads:
            thread.join(PATIENCE)
        assert ended == [Cancelled] * 3
        with pytest.raises(Cancelled):
            client.generate("a")
        client.close()


def test_a_stream_may_outlive_its_blocking_client(endpoint: str) -> None:
    with served(endpoint):
        client = Client(endpoint, timeout=5)
        stream = client.stream("a b c")
        chunks = iter(stream)
        next(chunks)
        client.close()
        stream.abort()
        with pytest.raises(Cancelled):
            list(chunks)


def test_a_blocking_client_says_when_nobody_is_there(endpoint: str) -> None:
    before = threading.active_count()
    with pytest.raises(Unavailable, match="no server was ready"):
        Client(endpoint, timeout=0.05)
    assert threading.active_count() == before


def test_the_package_hands_out_the_names_of_the_sdk() -> None:
    import ipc
    from ipc import sdk

    assert all(getattr(ipc, name) is getattr(sdk, name) for name in sdk.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nobody'"):
        ipc.Nobody  # noqa: B018
