"""Liveness, readiness, progress and metrics. None of them runs a generation."""

import asyncio
from typing import Literal

from aiohttp import web
from msgspec import Struct

from .answers import json_response
from .engine_metrics import block_counts
from .errors import unavailable
from .exposition import CONTENT_TYPE
from .service import SERVICE


class HealthState(Struct):
    status: Literal["live", "ready"]


class StuckRequest(Struct):
    id: str
    seconds: float


class Progress(Struct):
    """What the scheduler has said last, `age_seconds` ago."""

    engine_ready: bool
    recoveries: int
    step: int
    running: int
    waiting: int
    oldest_stuck_request: StuckRequest | None
    kv_blocks: dict[str, int]
    age_seconds: float


async def live(request: web.Request) -> web.StreamResponse:
    """GET /health/live: this process answers."""
    return json_response(HealthState("live"))


async def ready(request: web.Request) -> web.StreamResponse:
    """GET /health/ready: a generation would be accepted, and begin at once."""
    request.app[SERVICE].check_ready()
    return json_response(HealthState("ready"))


async def progress(request: web.Request) -> web.StreamResponse:
    """GET /health/progress: what the scheduler does, from its last report (`age_seconds` ago)."""
    service = request.app[SERVICE]
    stats = service.stats
    if stats is None:
        raise unavailable("the scheduler has not reported yet", "engine_unavailable")
    stuck = None
    if stats.stuck_request:
        stuck = StuckRequest(stats.stuck_request, round(stats.oldest_request_seconds, 3))
    return json_response(
        Progress(
            engine_ready=service.engine_up.is_set(),
            recoveries=stats.recoveries,
            step=stats.step,
            running=stats.running,
            waiting=stats.waiting,
            oldest_stuck_request=stuck,
            kv_blocks=block_counts(stats),
            age_seconds=round(service.stats_age(), 3),
        )
    )


async def metrics(request: web.Request) -> web.StreamResponse:
    """GET /metrics: Prometheus text, summed over all frontends."""
    service = request.app[SERVICE]
    service.metrics.flush()
    text = await asyncio.to_thread(service.metrics.render, service.stats)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})
