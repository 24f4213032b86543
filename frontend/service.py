"""What all handlers of one frontend process share: the engine's client, limits, metrics and the process's state."""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web

from config.schema import ChildSpec
from ipc.engine_client import EngineClient
from ipc.messages import ModelInfo
from ipc.stats_messages import EngineDetails, Stats
from ipc.tracing import Tracer

from .errors import unavailable
from .metrics import Metrics
from .span_sender import SpanSender
from .timelines import RequestTimeline, Timelines

_STALE_SECONDS = 10.0  # the scheduler reports several times a second


class Service:
    """State of one frontend: loading, serving, recovering, draining or lost."""

    def __init__(self, spec: ChildSpec, client: EngineClient, metrics: Metrics) -> None:
        process = f"frontend-{spec.index}"
        self.trace_endpoints = tuple(spec.endpoints.traces.values())
        self.tracer = Tracer(process, spec.endpoints.traces.get(process, ""))
        self.tracing = False  # somebody is having a trace taken by this process
        self.client = client
        self.metrics = metrics
        self.measures = spec.config.supervisor.measure
        self.timelines = Timelines(spec.config.server.timeline_requests if self.measures else 0)
        self.spans: SpanSender | None = None  # without it, no traces are sent
        self.index = spec.index
        self.frontends = spec.config.server.frontends
        self.served_names = spec.served_names
        self.max_body_bytes = spec.config.server.max_body_bytes
        self.client_timeout = spec.config.server.client_timeout
        self.keepalive_seconds = spec.config.server.keepalive_seconds
        identity = msgspec.json.encode((spec.arch, spec.config.model, spec.config.worker))
        self.fingerprint = "fp_" + hashlib.sha256(identity).hexdigest()[:10]
        self.stats: Stats | None = None
        self._stats_at = 0.0
        self.details: EngineDetails | None = None  # the newest, once the console has asked for them
        self.engine_up = asyncio.Event()  # cleared while the scheduler or its ranks are being started again
        self.engine_up.set()
        self.draining = False
        self.lost: str | None = None  # why, once the engine is lost for good
        self.over = asyncio.Event()  # set when this process has nothing more to wait for
        self.idle = asyncio.Event()
        self.idle.set()
        self._running = 0

    def model(self) -> ModelInfo:
        """The served model; 503 while it cannot be asked."""
        if self.lost is not None:
            raise unavailable(self.lost, "engine_unavailable")
        model = self.client.model
        if model is None:
            raise unavailable("the engine is not ready yet", "engine_unavailable")
        return model

    def model_for_new_request(self) -> ModelInfo:
        """The served model; 503 as well while draining."""
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests", "draining")
        return self.model()

    def check_ready(self) -> None:
        """503 unless a generation would begin now."""
        self.model_for_new_request()
        if not self.engine_up.is_set():
            raise unavailable("recovering: a process of the engine died and is being started again", "recovering")
        if self.stats is not None and self.stats_age() > _STALE_SECONDS:
            silence = f"the scheduler has reported nothing for {self.stats_age():.0f} s; it hangs, or the machine does"
            raise unavailable(silence, "engine_unresponsive")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Marks a generation as running, for `drain` to wait for."""
        self._running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self.idle.set()
                if self.draining:
                    self.over.set()

    def ended(self, timeline: RequestTimeline) -> None:
        """Keep what is known of a request that has ended, and tell it to whoever takes a trace."""
        self.timelines.add(timeline)
        if self.tracer.wanted:
            self.tracer.add(timeline.traced())

    def drain(self) -> None:
        """Take no new generation; `over` is set once the running ones have ended."""
        self.draining = True
        if not self._running:
            self.over.set()

    def fail(self, reason: str) -> None:
        """End every generation with an error that says `reason`."""
        self.lost = reason
        self.client.fail_all(reason)
        self.over.set()

    def on_stats(self, stats: Stats) -> None:
        """Keep the scheduler's newest counters."""
        self.stats = stats
        self._stats_at = time.monotonic()
        if stats.engine_ready:
            self.engine_up.set()
        else:
            self.engine_up.clear()

    def on_details(self, details: EngineDetails) -> None:
        self.details = details

    def on_stats_lost(self) -> None:
        """The scheduler is gone; its successor will say when it can take requests."""
        self.engine_up.clear()
        self.details = None

    def stats_age(self) -> float:
        """Seconds since the scheduler's counters arrived."""
        return time.monotonic() - self._stats_at


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
