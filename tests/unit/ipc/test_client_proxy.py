"""The SDK's clients behind a TCP proxy, whose port stays open while the server behind it is away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ipc import AsyncClient, AuthenticationFailed
from ipc.channels import BindError
from launch.listen import free_loopback_port
from tests.unit.ipc.fake_tokenizer import FakeTokenizer
from tests.unit.ipc.test_channels import until
from tests.unit.ipc.test_curve import Keys


class Proxy:
    """Takes each connection, and closes it at once where it finds nobody behind it."""

    def __init__(self, target: int) -> None:
        self.port = free_loopback_port()
        self.broken = 0  # connections for which nobody was there, since this was last set
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            self.broken += 1
            writer.close()
            return
        for source, sink in ((reader, to_server[1]), (to_server[0], writer)):
            task = asyncio.create_task(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def serving(keys: Keys, secured: bool) -> AsyncIterator[FakeTokenizer]:
    if secured:
        async with keys.serving() as tokenizer:
            yield tokenizer
        return
    plain: FakeTokenizer | None = None
    while plain is None:
        # ZeroMQ closes the port of a predecessor in the background.
        with contextlib.suppress(BindError):
            plain = FakeTokenizer(keys.address, remote=True)
        await asyncio.sleep(0.01)
    try:
        yield plain
    finally:
        plain.router.close()


@pytest.mark.parametrize("secured", [True, False], ids=["with keys", "without keys"])
def test_calls_outlive_a_restart_behind_a_proxy_that_goes_on_accepting(tmp_path: Path, secured: bool) -> None:
    keys = Keys(tmp_path)

    def client_of(proxy: Proxy) -> AsyncClient:
        if secured:
            return AsyncClient(proxy.address, key=keys.known, server_key=keys.server_key)
        return AsyncClient(proxy.address)

    async def main() -> None:
        async with asyncio.timeout(30), Proxy(int(keys.address.rpartition(":")[2])).running() as proxy:
            client = client_of(proxy)
            async with serving(keys, secured) as tokenizer:
                await client.connect(10)
                lost = asyncio.create_task(client.generate("hang"))
                await until(lambda: len(tokenizer.asked) == 1)
            await until(lambda: client.model is None)
            late = asyncio.create_task(client.generate("a"))
            proxy.broken = 0
            await until(lambda: proxy.broken >= 10)
            assert not lost.done()
            assert not late.done()
            # To a client that has never been connected it could as well be no server at all, or another one.
            newcomer = client_of(proxy)
            with pytest.raises(AuthenticationFailed, match="the server breaks off each handshake"):
                await newcomer.connect(10)
            async with serving(keys, secured) as successor:
                assert (await late).text == "a"
                await until(lambda: len(successor.asked) == 2)  # the lost one too
                # It hears of the server as soon as there is one.
                await until(lambda: newcomer.model is not None)
                assert (await newcomer.generate("b")).text == "b"
                lost.cancel()
                await client.close()
                await newcomer.close()

    asyncio.run(main())
