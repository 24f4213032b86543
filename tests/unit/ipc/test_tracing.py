"""A process tells of its work while somebody listens, and only then."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ipc import tracing
from ipc.trace_messages import Trace, TracedDetokenizing
from ipc.tracing import TraceListener, Tracer
from tests.unit.ipc.test_channels import until


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 30))  # type: ignore[arg-type]


def item(number: int) -> TracedDetokenizing:
    return TracedDetokenizing(1.0, 2.0, number)


def test_each_listener_hears_each_process_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    async def body() -> None:
        endpoints = [f"ipc://{tmp_path}/{name}" for name in "ab"]
        tracers = [Tracer(name, endpoint) for name, endpoint in zip("ab", endpoints, strict=True)]
        for tracer in tracers:
            tracer.start()
        heard: list[list[Trace]] = [[], []]
        listeners = [TraceListener(endpoints, traces.append) for traces in heard]
        assert not any(tracer.wanted for tracer in tracers)
        listeners[0].start()
        await until(lambda: all(tracer.wanted for tracer in tracers))
        tracers[0].add(item(1))
        tracers[1].add(item(2))
        await until(lambda: len(heard[0]) == 2)
        assert sorted(heard[0], key=lambda trace: trace.process) == [
            Trace("a", (item(1),), 0),
            Trace("b", (item(2),), 0),
        ]
        listeners[1].start()
        while not heard[1]:  # when it is heard of cannot be seen from outside
            tracers[0].add(item(3))
            await asyncio.sleep(0.01)
        listeners[0].close()
        await asyncio.sleep(0.1)
        assert all(tracer.wanted for tracer in tracers), "one listens still"
        listeners[1].close()
        await until(lambda: not any(tracer.wanted for tracer in tracers))
        for tracer in tracers:
            tracer.close()

    run(body)


def test_what_nobody_took_is_forgotten(tmp_path: Path) -> None:
    async def body() -> None:
        endpoint = f"ipc://{tmp_path}/a"
        tracer = Tracer("a", endpoint)
        tracer.start()
        heard: list[Trace] = []
        for number in range(2):
            listener = TraceListener([endpoint], heard.append)
            listener.start()
            await until(lambda: tracer.wanted)
            if number == 1:
                tracer.add(item(1))
                await until(lambda: len(heard) == 1)
            listener.close()
            await until(lambda: not tracer.wanted)
            tracer.add(item(99))  # noted between the question and the end
            await asyncio.sleep(2 * tracing.FLUSH_SECONDS)
        assert heard == [Trace("a", (item(1),), 0)]
        tracer.close()

    run(body)


def test_there_is_room_for_so_much_and_the_rest_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_ITEMS", 2)

    async def body() -> None:
        endpoint = f"ipc://{tmp_path}/a"
        tracer = Tracer("a", endpoint)
        tracer.start()
        heard: list[Trace] = []
        listener = TraceListener([endpoint], heard.append)
        listener.start()
        await until(lambda: tracer.wanted)
        for number in range(5):
            tracer.add(item(number))
        await until(lambda: len(heard) == 1)
        assert heard == [Trace("a", (item(0), item(1)), 3)]
        tracer.add(item(7))
        await until(lambda: len(heard) == 2)
        assert heard[1] == Trace("a", (item(7),), 0)
        listener.close()
        tracer.close()

    run(body)


def test_without_an_endpoint_nobody_ever_wants_it() -> None:
    async def body() -> None:
        tracer = Tracer("a", "")
        tracer.start()
        assert not tracer.wanted
        tracer.close()

    run(body)
