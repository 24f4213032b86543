"""GET /diagnose: what holds the workload back at the moment, and which setting to turn, as the scheduler finds it."""

import asyncio
from collections.abc import Callable

from aiohttp import web
from msgspec import Struct

from ipc.stats_messages import Cause, CauseName, DiagnosedMetric, Diagnosis, MetricName

from .answers import json_response
from .errors import not_measured, unavailable
from .service import SERVICE

_FRESH_SECONDS = 3.0  # so old may one be that is given out
_PATIENCE_SECONDS = 20.0  # for the scheduler to make one


class CauseObject(Struct, frozen=True):
    """One thing that bounds a metric."""

    cause: CauseName
    evidence: str
    setting: str | None  # the flag to change; null: none would help
    before: str | None
    after: str | None
    predicted: float  # the metric with that change alone
    confidence: float  # 0 to 1
    effects: dict[MetricName, float]  # the other metrics with it


class MetricObject(Struct, frozen=True):
    """A metric: seconds, output tokens a second (throughput), requests that run at once (concurrency)."""

    name: MetricName
    value: float
    parts: dict[str, float]  # what it is made of: seconds, or shares of the time
    causes: list[CauseObject]  # first the one whose change would improve it most


class DiagnosisObject(Struct, frozen=True):
    """What bounds the engine at the moment."""

    time: float  # unix seconds
    seconds: float  # that it looks back
    arrived: int  # requests in that time
    finished: int
    summary: str
    measures: dict[str, float]
    metrics: list[MetricObject]


class Diagnoses:
    """Has the scheduler make one diagnosis for all who want it now. All methods belong to the event loop."""

    def __init__(self, ask: Callable[[bool], None]) -> None:
        """`ask`: begins and ends the scheduler's sending of them."""
        self._ask = ask
        self._newest: Diagnosis | None = None
        self._came = 0.0
        self._arrival: asyncio.Event = asyncio.Event()
        self._waiting = 0  # for the next one

    def take(self, diagnosis: Diagnosis) -> None:
        """The scheduler has sent one."""
        self._newest = diagnosis
        self._came = asyncio.get_running_loop().time()
        self._arrival.set()
        self._arrival = asyncio.Event()

    async def newest(self) -> Diagnosis:
        """One of this moment; 503 when the scheduler does not make any."""
        if self._newest is None or asyncio.get_running_loop().time() - self._came > _FRESH_SECONDS:
            await self._next()
        assert self._newest is not None
        return self._newest

    async def _next(self) -> None:
        if not self._waiting:
            self._ask(True)
        self._waiting += 1
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._arrival.wait()
        except TimeoutError:
            raise unavailable("the scheduler has made no diagnosis yet", "engine_unavailable") from None
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._ask(False)


DIAGNOSES: web.AppKey[Diagnoses] = web.AppKey("diagnoses", Diagnoses)


async def diagnose(request: web.Request) -> web.StreamResponse:
    """GET /diagnose: a diagnosis that is at most three seconds old."""
    if not request.app[SERVICE].measures:
        raise not_measured("there is nothing to diagnose from")
    return json_response(_object(await request.app[DIAGNOSES].newest()))


def _object(diagnosis: Diagnosis) -> DiagnosisObject:
    return DiagnosisObject(
        diagnosis.time,
        diagnosis.seconds,
        diagnosis.arrived,
        diagnosis.finished,
        diagnosis.summary,
        dict(diagnosis.measures),
        [_metric(metric) for metric in diagnosis.metrics],
    )


def _metric(metric: DiagnosedMetric) -> MetricObject:
    return MetricObject(metric.name, metric.value, dict(metric.parts), [_cause(cause) for cause in metric.causes])


def _cause(cause: Cause) -> CauseObject:
    return CauseObject(
        cause.cause,
        cause.evidence,
        cause.setting or None,
        cause.before or None,
        cause.after or None,
        cause.predicted,
        cause.confidence,
        dict(cause.effects),
    )
