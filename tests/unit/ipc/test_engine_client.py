"""The engine's own client against a scripted tokenizer process on a real socket."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ipc.engine_client import EngineClient
from ipc.errors import RequestFailed
from ipc.messages import (
    Delta,
    Finished,
    Generate,
    SamplingParams,
    TextPrompt,
)
from tests.unit.ipc.fake_tokenizer import MODEL, FakeTokenizer
from tests.unit.ipc.test_channels import until


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/tokenizer"


def test_a_stream_yields_its_deltas_and_ends(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        assert await client.connect(5) == MODEL
        items = [item async for batch in client.generate(TextPrompt("a b c"), SamplingParams(n=2)) for item in batch]
        assert [item.text for item in items if isinstance(item, Delta) and item.index == 1] == ["a", "b", "c"]
        assert [item.index for item in items if isinstance(item, Finished)] == [0, 1]
        assert client.live_requests == 0
        await client.close()
        tokenizer.router.close()

    asyncio.run(main())


OPTIONS: dict[str, Any] = {
    "external_id": "trace-1",
    "namespace": "ns",
    "tenant": "team",
    "priority": -3,
    "ttft_target_ms": 250,
    "cache_pin_seconds": 1.5,
}


def test_embeddings_are_made_as_asked_for_and_else_as_suits_the_model(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        for pooling in ("", "last", "cls"):
            await client.embed(TextPrompt("a"), pooling)
        assert [asked.pooling for asked in tokenizer.asked] == ["mean", "last", "cls"]
        assert {(asked.params.max_tokens, asked.params.n) for asked in tokenizer.asked} == {(1, 1)}
        with pytest.raises(RequestFailed, match="pooling must be one of last, mean, cls") as caught:
            await client.embed(TextPrompt("a"), "max")  # type: ignore[arg-type]
        assert caught.value.failed.param == "pooling"
        await client.close()
        tokenizer.router.close()

    asyncio.run(main())


def test_options_reach_the_engine(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        for options in (OPTIONS, {}):
            _ = [batch async for batch in client.generate(TextPrompt("a"), SamplingParams(stop_on_loop=3), **options)]
        first, second = tokenizer.asked
        assert {name: getattr(first, name) for name in OPTIONS} == OPTIONS
        assert first.params.stop_on_loop == 3
        assert second == Generate(second.request_id, TextPrompt("a"), SamplingParams(stop_on_loop=3))
        await client.close()
        tokenizer.router.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("params", "options", "param"),
    [
        ({}, {"priority": 1_000_001}, "priority"),
        ({}, {"priority": "high"}, "priority"),
        ({}, {"ttft_target_ms": float("nan")}, "ttft_target_ms"),
        ({}, {"ttft_target_ms": 0}, "ttft_target_ms"),
        ({}, {"cache_pin_seconds": 3601}, "cache_pin_seconds"),
        ({}, {"namespace": "n" * 129}, "namespace"),
        ({}, {"namespace": None}, "namespace"),
        ({"stop_on_loop": 1}, {}, "stop_on_loop"),
        ({"stop_on_loop": 10**30}, {}, "stop_on_loop"),
        ({"temperature": "1"}, {}, "temperature"),
    ],
    ids=str,
)
def test_a_value_out_of_bounds_fails_its_request_and_leaves_the_connection(
    endpoint: str, params: dict[str, Any], options: dict[str, Any], param: str
) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        running = client.generate(TextPrompt("hang"), SamplingParams())
        with pytest.raises(RequestFailed, match=param) as caught:
            _ = [batch async for batch in client.generate(TextPrompt("a"), SamplingParams(**params), **options)]
        failed = caught.value.failed
        assert (failed.status, failed.type, failed.param) == (400, "invalid_request_error", param)
        assert len([batch async for batch in client.generate(TextPrompt("a"), SamplingParams())]) >= 1
        assert [request.prompt for request in tokenizer.asked] == [TextPrompt("hang"), TextPrompt("a")]
        assert not running.done
        assert client.live_requests == 1
        await client.close()
        tokenizer.router.close()

    asyncio.run(main())


def test_an_unknown_option_is_a_type_error(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        with pytest.raises(TypeError, match="urgency"):
            client.generate(TextPrompt("a"), SamplingParams(), urgency=1)  # type: ignore[call-arg]
        await client.close()
        tokenizer.router.close()

    asyncio.run(main())


def test_a_failure_is_raised_after_what_came_before_it(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        texts: list[str] = []
        with pytest.raises(RequestFailed, match="prompt: no") as caught:
            async for batch in client.generate(TextPrompt("fail"), SamplingParams()):
                texts += [item.text for item in batch if isinstance(item, Delta)]
        assert texts == ["part"]
        assert caught.value.failed.param == "prompt"
        await client.close()
        tokenizer.router.close()

    asyncio.run(main())


def test_abort_ends_the_iteration_and_reaches_the_engine(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        stream = client.generate(TextPrompt("hang"), SamplingParams())
        asyncio.get_running_loop().call_later(0.05, stream.abort)
        assert [batch async for batch in stream] == []
        stream.abort()
        await until(lambda: tokenizer.aborted == [stream.request_id])
        await client.close()
        tokenizer.router.close()

    asyncio.run(main())


Items = list[Delta | Finished]


def test_deliver_hands_over_what_iterating_yields(endpoint: str) -> None:
    async def main() -> None:
        FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        got: list[Items] = []
        await client.generate(TextPrompt("a b c"), SamplingParams(n=2)).deliver(got.append)
        items = [item for batch in got for item in batch]
        assert all(got)
        for index in (0, 1):
            mine = [item for item in items if item.index == index]
            assert [item.text for item in mine if isinstance(item, Delta)] == ["a", "b", "c"]
            assert [isinstance(item, Finished) for item in mine] == [False, False, False, True]
        assert client.live_requests == 0
        await client.close()

    asyncio.run(main())


def test_deliver_raises_a_failure_after_what_came_before_it(endpoint: str) -> None:
    async def main() -> None:
        FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        got: list[Items] = []
        with pytest.raises(RequestFailed, match="prompt: no"):
            await client.generate(TextPrompt("fail"), SamplingParams()).deliver(got.append)
        assert [item.text for batch in got for item in batch if isinstance(item, Delta)] == ["part"]
        await client.close()

    asyncio.run(main())


def test_what_the_receiver_raises_ends_its_own_delivery_only(endpoint: str) -> None:
    async def main() -> None:
        FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)

        def refuse(items: Items) -> None:
            raise ValueError("no more")

        got: list[Items] = []
        refused = client.generate(TextPrompt("a b"), SamplingParams())
        others = client.generate(TextPrompt("c d"), SamplingParams()).deliver(got.append)
        with pytest.raises(ValueError, match="no more"):
            await refused.deliver(refuse)
        refused.abort()
        await others
        assert [item.text for batch in got for item in batch if isinstance(item, Delta)] == ["c", "d"]
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("text", ["hang", "a b c"])
def test_an_aborted_delivery_ends_without_another_item(endpoint: str, text: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        got: list[Items] = []
        stream = client.generate(TextPrompt(text), SamplingParams())
        delivery = asyncio.create_task(stream.deliver(got.append))
        await until(lambda: len(tokenizer.asked) == 1)
        stream.abort()
        before = len(got)
        await asyncio.wait_for(delivery, 5)
        await asyncio.sleep(0)
        assert len(got) == before
        await client.close()

    asyncio.run(main())


def test_an_aborted_delivery_gets_nothing_of_what_had_arrived_with_the_end(endpoint: str) -> None:
    async def main() -> None:
        FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        got: list[Items] = []
        # The first takes what all have got, and the others have their turn later.
        first = client.generate(TextPrompt("a"), SamplingParams())
        others = [client.generate(TextPrompt("a"), SamplingParams()) for _ in range(400)]

        def stop(items: Items) -> None:
            for other in others:
                other.abort()
            got.clear()

        await asyncio.wait_for(asyncio.gather(first.deliver(stop), *(other.deliver(got.append) for other in others)), 5)
        assert not got
        assert any(not other._aborted for other in others), "some had ended when they were aborted"
        await client.close()

    asyncio.run(main())


def test_many_streams_get_each_what_is_theirs_in_order(endpoint: str) -> None:
    async def main() -> None:
        FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        got: list[list[str]] = [[] for _ in range(200)]

        def taking(texts: list[str]) -> Callable[[Items], None]:
            return lambda items: texts.extend(item.text for item in items if isinstance(item, Delta))

        streams = [client.generate(TextPrompt(f"a{at} b{at}"), SamplingParams()) for at in range(200)]
        await asyncio.gather(*(stream.deliver(taking(texts)) for stream, texts in zip(streams, got, strict=True)))
        assert got == [[f"a{at}", f"b{at}"] for at in range(200)]
        await client.close()

    asyncio.run(main())


def test_a_lost_engine_fails_what_runs_and_what_comes_next_until_it_is_back(endpoint: str) -> None:
    async def main() -> None:
        tokenizer = FakeTokenizer(endpoint)
        client = EngineClient([endpoint])
        await client.connect(5)
        stream = client.generate(TextPrompt("hang"), SamplingParams())
        asyncio.get_running_loop().call_later(0.05, tokenizer.router.close)
        with pytest.raises(RequestFailed, match="connection to the engine was lost") as caught:
            _ = [batch async for batch in stream]
        assert caught.value.failed.status == 503
        assert client.model is None
        with pytest.raises(RequestFailed, match="not ready"):
            _ = [batch async for batch in client.generate(TextPrompt("a"), SamplingParams())]
        successor = FakeTokenizer(endpoint)
        await client.connect(5)
        assert len([batch async for batch in client.generate(TextPrompt("a"), SamplingParams())]) >= 1
        await client.close()
        successor.router.close()

    asyncio.run(main())


def test_connect_times_out_when_nobody_is_there(endpoint: str) -> None:
    async def main() -> None:
        client = EngineClient([endpoint])
        with pytest.raises(TimeoutError):
            await client.connect(0.05)
        await client.close()

    asyncio.run(main())


def test_no_endpoint_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="endpoints"):
        EngineClient([])
