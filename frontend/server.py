"""The frontend process: its socket, its tasks, and the launcher's orders."""

import asyncio
import gc
import logging
import os
import socket
from typing import Any
from weakref import WeakSet

from aiohttp import web

from config.api_keys import read_api_keys
from config.schema import ChildSpec
from config.sources import ConfigError
from config.tls import server_context
from ipc.control import Control, Drain, Idle, Order, StartError, end_on_error
from ipc.engine_client import EngineClient
from ipc.stats_channel import StatsSubscriber

from .app import make_app
from .connection import Connection, watch_backlogs
from .console import Console
from .diagnosis import Diagnoses
from .gate import Gate
from .identity import identity_of
from .metrics import Metrics
from .reporting import report
from .service import Service
from .span_sender import SpanSender
from .streaming import KeepAlive

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 1.2  # for error events to be written once the engine is lost
_CLOSE_SECONDS = 0.5  # for connections to end
_LINGER_SECONDS = 10.0  # for a client to send the rest of a body that is refused, and then to read why


async def serve(spec: ChildSpec, control: Control) -> None:
    """Serve until drained or the engine is lost; raises when a task of the process fails."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_error)
    client = EngineClient(spec.endpoints.clients)
    server = spec.config.server
    try:
        keys = read_api_keys(server.api_key_file, os.environ).keys
        tls = server_context(server.tls_cert, server.tls_key)
    except ConfigError as error:  # the launcher has found them good, but they are files
        raise StartError(str(error)) from None
    service = Service(spec, client, Metrics(identity_of(spec, keys)))
    if server.otlp_endpoint:
        try:
            service.spans = SpanSender(server.otlp_endpoint, f"frontend-{spec.index}")
        except ConfigError as error:
            raise StartError(str(error)) from None
    keep_alive = KeepAlive(service.keepalive_seconds)
    gate = Gate(keys, server.cors_origin)

    def on_order(order: Order) -> None:
        loop.call_soon_threadsafe(obey, order)

    def obey(order: Order) -> None:
        if isinstance(order, Drain):
            service.drain()
        else:
            service.fail(order.reason)

    control.listen(on_order, loop)
    diagnoses = Diagnoses(lambda wanted: stats.ask_for_diagnosis(wanted))
    stats = StatsSubscriber(
        spec.endpoints.stats, service.on_stats, service.on_stats_lost, service.on_details, diagnoses.take
    )
    console = Console(spec, service, stats.ask_for_details) if server.console else None
    app = make_app(service, keep_alive, gate, diagnoses, console)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CLOSE_SECONDS)
    await runner.setup()
    manager = runner.server
    assert manager is not None

    connections: WeakSet[Connection] = WeakSet()

    def connection() -> Connection:
        # No access log: the guard middleware has a line of its own.
        made = Connection(
            manager,
            loop=loop,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=server.client_timeout,
            lingering_time=min(_LINGER_SECONDS, server.client_timeout),
        )
        connections.add(made)
        return made

    listener = await loop.create_server(
        connection,
        sock=socket.socket(fileno=spec.listen_fd),
        backlog=1024,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else server.client_timeout,
        # For the client to say that it closes too; the default is 30 s.
        ssl_shutdown_timeout=None if tls is None else min(_LINGER_SECONDS, server.client_timeout),
    )
    control.stage("waiting for the engine")
    stats.start()
    service.tracer.start()
    gc.collect()
    gc.freeze()  # modules, routes and schemas stay: looking through them would stop all streams for 30 ms each time

    async def announce() -> None:
        await client.connect()
        await service.engine_up.wait()
        control.ready()

    works = [
        keep_alive.run(),
        announce(),
        service.metrics.run(),
        watch_backlogs(connections, server.client_timeout),
    ]
    if service.measures:
        works.append(report(client, f"frontend-{spec.index}", connections))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        await service.over.wait()
        for task in tasks:
            task.cancel()
    if service.lost is not None:
        await _flush(service)
    else:
        control.report(Idle())
    listener.close()
    await runner.cleanup()
    stats.close()
    service.tracer.close()
    if service.spans is not None:
        await service.spans.close()
    await client.close()


async def _flush(service: Service) -> None:
    try:
        async with asyncio.timeout(_FLUSH_SECONDS):
            await service.idle.wait()
    except TimeoutError:
        log.warning("some clients could not be told that the engine is lost")


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # A callback of ours that fails (a link out of order) must end the process; a client's broken connection must not.
    if "handle" in context:
        end_on_error(loop, context)
    log.debug("%s: %r", context.get("message"), context.get("exception"))
