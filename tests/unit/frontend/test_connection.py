"""What a connection tells of a client that does not read."""

import asyncio
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web

from config.tls import server_context
from frontend.connection import Connection
from frontend.route import Handler
from tests.unit.ipc.test_channels import until


def test_bytes_that_nobody_reads_are_counted() -> None:
    size = 40_000

    async def main() -> None:
        made: list[Connection] = []

        async def handle(request: web.Request) -> web.Response:
            return web.Response(body=bytes(size))

        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        manager: Any = runner.server
        loop = asyncio.get_running_loop()

        def connect() -> Connection:
            made.append(Connection(manager, loop=loop, access_log=None))
            return made[-1]

        server = await loop.create_server(connect, "127.0.0.1", 0)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(server.sockets[0].getsockname())
        await until(lambda: bool(made))
        assert made[0].unread == 0
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: made[0].unread > 20_000)
        client.setblocking(False)
        got = 0
        while got < size:
            got += len(await loop.sock_recv(client, 65536))
        await until(lambda: made[0].unread == 0)
        client.close()
        await until(lambda: made[0].backlog == 0)
        assert made[0].unread == 0
        server.close()
        await runner.cleanup()

    uvloop.run(main())


def test_the_arrival_is_when_the_last_bytes_came_in() -> None:
    """Not when they began to come, nor when somebody got round to them."""
    wait = 0.05

    async def main() -> None:
        found: dict[str, float] = {}

        @web.middleware
        async def held_up(request: web.Request, handler: Handler) -> web.StreamResponse:
            await request.read()
            await asyncio.sleep(wait)
            return await handler(request)

        async def handle(request: web.Request) -> web.Response:
            protocol = request.protocol
            assert isinstance(protocol, Connection)
            found["arrival"], found["handled"] = protocol.received, time.monotonic()
            return web.Response()

        app = web.Application(middlewares=[held_up])
        app.router.add_post("/", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        manager: Any = runner.server
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(manager, loop=loop, access_log=None), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for _ in range(2):  # also of a connection's second request
            found.clear()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
            await asyncio.sleep(wait)
            last = time.monotonic()
            writer.write(b"cd")
            await reader.readuntil(b"\r\n\r\n")
            assert last <= found["arrival"] <= found["handled"] - wait
        writer.close()
        server.close()
        await runner.cleanup()

    uvloop.run(main())


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("end", ["abort", "close", "reset", "hang up"])
def test_a_connection_that_ends_can_be_looked_at_in_each_turn_of_the_loop(end: str, encrypted: bool) -> None:
    """uvloop gives a transport up a turn before its protocol hears of it; the watch on backlogs may come between."""
    files = Path(__file__).parents[2] / "processes" / "frontend" / "tls"
    served = server_context(str(files / "cert.pem"), str(files / "key.pem")) if encrypted else None

    async def main() -> None:
        made: list[Connection] = []
        app = web.Application()
        runner = web.AppRunner(app)
        await runner.setup()
        manager: Any = runner.server
        loop = asyncio.get_running_loop()

        def connect() -> Connection:
            made.append(Connection(manager, loop=loop, access_log=None))
            return made[-1]

        server = await loop.create_server(
            connect, "127.0.0.1", 0, ssl=served, ssl_shutdown_timeout=1 if served else None
        )
        trusted = ssl.create_default_context(cafile=files / "cert.pem") if encrypted else None
        host, port = server.sockets[0].getsockname()
        name = "localhost" if encrypted else None
        _, writer = await asyncio.open_connection(host, port, ssl=trusted, server_hostname=name)
        await until(lambda: bool(made) and made[0]._wire is not None)
        wire = made[0]._wire
        assert wire is not None
        if end == "abort":
            wire.abort()
        elif end == "close":
            wire.close()
        elif end == "reset":
            writer.transport.abort()
        else:
            writer.close()
        turns = 0
        while made[0]._wire is not None:
            made[0].check_backlog(loop.time(), 5)
            assert made[0].unread >= 0
            turns += 1
            await asyncio.sleep(0 if turns < 1000 else 0.01)
            assert turns < 2000
        writer.close()
        server.close()
        await runner.cleanup()

    uvloop.run(main())
