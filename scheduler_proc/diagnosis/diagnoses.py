"""Makes diagnoses while somebody asks for them: in pieces, between which the scheduler plans and answers."""

import asyncio
import logging
import time
from itertools import islice

from ipc.stats_channel import StatsPublisher
from ipc.stats_messages import Diagnosis
from scheduler_proc.core import SchedulerCore
from scheduler_proc.diagnosis.changes import Engine
from scheduler_proc.diagnosis.diagnoser import diagnose
from scheduler_proc.diagnosis.processes import Processes
from scheduler_proc.diagnosis.window import ended
from scheduler_proc.diagnosis.workload import facts_of
from scheduler_proc.request import Request

log = logging.getLogger(__name__)

MAX_LIVE = 1024  # requests that have not ended, and are looked at: of more, those that came first and last
_NEWEST = 256  # of them, the last: all that are replayed
_LOOK_SECONDS = 0.25  # for who asks
_PAUSE_SECONDS = 0.003  # between two pieces: a piece takes about a millisecond
_LEAST_SECONDS = 1.0  # from the begin of one diagnosis to that of the next


def looked_at(requests: dict[tuple[bytes, int], Request]) -> list[Request]:
    """All of them, or the first and the last to come: those that run, and those that tell how many arrive."""
    if len(requests) <= MAX_LIVE:
        return list(requests.values())
    newest = list(islice(reversed(requests.values()), _NEWEST))
    return [*islice(requests.values(), MAX_LIVE - _NEWEST), *reversed(newest)]


class Diagnoses:
    """The task of it. `processes` is to be told of what the processes report."""

    def __init__(self, core: SchedulerCore, engine: Engine, publisher: StatsPublisher) -> None:
        """`core`: one that measures."""
        assert core.window is not None
        self._core = core
        self._window = core.window
        self._engine = engine
        self._publisher = publisher
        self.processes = Processes(core.window.seconds)

    async def run(self) -> None:
        """Until cancelled. Serving goes on where a diagnosis fails."""
        while True:
            begun = time.monotonic()
            if self._publisher.diagnosis_wanted:
                try:
                    self._publisher.send_diagnosis(await self._make())
                except Exception:
                    log.exception("no diagnosis")
                await asyncio.sleep(max(_LOOK_SECONDS, begun + _LEAST_SECONDS - time.monotonic()))
            else:
                await asyncio.sleep(_LOOK_SECONDS)

    async def _make(self) -> Diagnosis:
        core, now = self._core, time.monotonic()
        live = [ended(request, now, "aborted") for request in looked_at(core.requests)]
        await asyncio.sleep(_PAUSE_SECONDS)
        facts = facts_of(self._window, live, core.totals(now), core.cost_model, now)
        pieces = diagnose(self._engine, facts, core.cost_model, self.processes.cpu(), time.time())
        while True:
            await asyncio.sleep(_PAUSE_SECONDS)
            try:
                next(pieces)
            except StopIteration as end:
                diagnosis: Diagnosis = end.value
                return diagnosis
