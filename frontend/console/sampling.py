"""Samples of the engine, one a second, and those of the last minutes.

Taken from the moment that somebody looks until some minutes after the last one has gone, so that the page can be loaded
again without losing its plots. Nothing is measured for it: it reads what `/metrics` reads.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from ipc.stats_messages import Stats

from ..engine_metrics import block_counts
from ..errors import ApiError
from ..service import Service
from .latency import Latency, Window

log = logging.getLogger(__name__)

PERIOD = 1.0  # seconds
HISTORY = 300  # samples
MAX_WATCHERS = 32
_SILENT_SECONDS = 3.0  # without a report, after which the last one's numbers are not shown any more
TTFT = "time_to_first_token_seconds"  # the histograms' names
ITL = "inter_token_latency_seconds"


class Rates(Struct, frozen=True):
    """Per second, since the sample before."""

    prefill_tokens: float
    decode_tokens: float
    finished: float
    device_busy: float  # share of the time that the device spent in steps


class Sample(Struct, frozen=True, kw_only=True):
    """The engine at one moment; numbers of the scheduler are None while it does not report."""

    time: float  # unix seconds
    state: str  # "ready", or the code of the error that requests get
    message: str  # that error's
    step: int | None = None
    running: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    kv_blocks: dict[str, int] | None = None
    kv_unused: int | None = None  # of the cached blocks
    host_blocks: dict[str, int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    finished: int | None = None
    preemptions: int | None = None
    recoveries: int | None = None
    stats_age: float | None = None  # seconds
    rates: Rates | None = None
    ttft: Latency | None = None
    itl: Latency | None = None


class Sampler:
    """Takes samples while there are watchers. All methods belong to the event loop."""

    def __init__(self, service: Service, ask_for_details: Callable[[bool], None]) -> None:
        self._service = service
        self._ask_for_details = ask_for_details
        self._watchers: set[asyncio.Queue[Sample | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._before: Stats | None = None  # the counters at the last sample
        self._ttft, self._itl = Window(), Window()
        self.history: deque[Sample] = deque(maxlen=HISTORY)

    @contextmanager
    def watching(self) -> Iterator[asyncio.Queue[Sample | None]]:
        """Every sample from now on, and None when the server ends. 503 when too many watch already."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise ApiError(503, f"{MAX_WATCHERS} consoles are open already", code="too_many_consoles", retry_after=10)
        samples: asyncio.Queue[Sample | None] = asyncio.Queue(maxsize=8)
        if not self._watchers:
            self._ask_for_details(True)
        self._watchers.add(samples)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield samples
        finally:
            self._watchers.discard(samples)
            if not self._watchers:
                self._ask_for_details(False)

    async def close(self) -> None:
        """End every watcher's stream."""
        if self._task is not None:
            self._task.cancel()
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def _run(self) -> None:
        alone = 0.0
        while alone < HISTORY * PERIOD:
            try:
                sample = await self._take()
            except Exception:
                log.exception("no sample for the console")
            else:
                self.history.append(sample)
                for queue in self._watchers:
                    if not queue.full():  # else its stream is about to be cut off
                        queue.put_nowait(sample)
            await asyncio.sleep(PERIOD)
            alone = 0.0 if self._watchers else alone + PERIOD

    async def _take(self) -> Sample:
        service = self._service
        counts = await asyncio.to_thread(service.metrics.histograms, TTFT, ITL)
        now = time.monotonic()
        ttft, itl = self._ttft.add(now, counts[TTFT]), self._itl.add(now, counts[ITL])
        state, message = "ready", ""
        try:
            service.check_ready()
        except ApiError as error:
            state, message = error.body.code or "unavailable", error.body.message
        stats, before = service.stats, self._before
        if stats is None or service.stats_age() > _SILENT_SECONDS:
            return Sample(time=time.time(), state=state, message=message, ttft=ttft, itl=itl)
        self._before = stats
        return Sample(
            time=time.time(),
            state=state,
            message=message,
            step=stats.step,
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            kv_blocks=block_counts(stats),
            kv_unused=stats.blocks_unused,
            host_blocks={"used": stats.host_blocks_used, "total": stats.host_blocks_total},
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            generated_tokens=stats.generated_tokens,
            finished=stats.finished,
            preemptions=stats.preemptions,
            recoveries=stats.recoveries,
            stats_age=round(service.stats_age(), 3),
            rates=rates_between(before, stats),
            ttft=ttft,
            itl=itl,
        )


def rates_between(before: Stats | None, after: Stats) -> Rates | None:
    """None when they cannot be told: nothing new, or the scheduler has begun to count anew."""
    if before is None or after.step < before.step or (seconds := after.time - before.time) <= 0:
        return None
    return Rates(
        prefill_tokens=(after.prefill_tokens - before.prefill_tokens) / seconds,
        decode_tokens=(after.generated_tokens - before.generated_tokens) / seconds,
        finished=(after.finished - before.finished) / seconds,
        device_busy=min(1.0, (after.device_busy_seconds - before.device_busy_seconds) / seconds),
    )
