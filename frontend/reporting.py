"""Tells the engine how this process does, and how its clients do: whether they are what is slow."""

import asyncio
from collections.abc import Iterable

from ipc.engine_client import EngineClient
from ipc.messages import ClientReport
from ipc.process_usage import UsageMeter, watch_loop

from .connection import Connection

_PERIOD = 1.0  # seconds
# On one connection: the events of some forty tokens. A client that reads leaves less, if it is not both far and fast:
# 200 tokens a second over a round trip of 0.2 s have as much under way.
_SLOW_BYTES = 8 << 10


async def report(client: EngineClient, name: str, connections: Iterable[Connection]) -> None:
    """Once a second; runs until it is cancelled."""
    meter = UsageMeter(name)
    watching = asyncio.create_task(watch_loop(meter.add_lag))
    try:
        while True:
            await asyncio.sleep(_PERIOD)
            usage = meter.usage()
            waiting = [unread for connection in list(connections) if (unread := connection.unread) >= _SLOW_BYTES]
            looks = sum(usage.lags)
            client.report(ClientReport(name, usage.cpu_seconds, looks, usage.lag_seconds, len(waiting), sum(waiting)))
    finally:
        watching.cancel()
