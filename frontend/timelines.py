"""When what happened to requests: told with the answer to those that ask for it, and kept of the last ones that ended.

What is kept are the engine's own messages about the ends of choices, in which there is no text. They are made into
something to read only when somebody asks.
"""

import itertools
import time
from collections.abc import Mapping

from aiohttp import web
from msgspec import structs

from ipc import messages
from ipc.messages import Finished
from ipc.timing_columns import chunks_of
from ipc.trace_messages import TracedRequest

from .errors import ApiError
from .timings import ChoiceTimings, Failure, RequestRecord, Status, Timings

_UNTOLD = messages.Timings(0.0, 0.0, 0.0, 0.0, messages.ChoiceTimings())  # by an engine that tells none
HEADER = "x-tokenmill-timings"


def clock_offset() -> float:
    """Seconds that make Unix time of the monotonic clock's, which stands still while the machine is suspended."""
    return time.time() - time.monotonic()


def wants_timings(request: web.Request, *, measures: bool) -> bool:
    """Whether the answer shall tell them; 400 when the header says neither yes nor no, or `measures` is False."""
    value = request.headers.get(HEADER, "0")
    if value not in ("0", "1"):
        raise ApiError(400, f"the header {HEADER} must be 1 or 0", param=HEADER)
    if value == "1" and not measures:
        raise ApiError(
            400,
            f"the header {HEADER} must be 0 or left out: the server was started with --no-measure",
            param=HEADER,
            code="not_measured",
        )
    return value == "1"


class RequestTimeline:
    """What is kept of one request. Times are seconds of the monotonic clock, which the engine's processes share."""

    __slots__ = ("arrival", "choices", "ended", "ends", "error", "first_output", "request_id", "route", "unix_arrival")

    def __init__(self, request_id: str, arrival: float, choices: int, ends: Mapping[int, Finished]) -> None:
        """`choices`: over all prompts; `ends` is filled by others as they finish."""
        self.request_id = request_id
        self.arrival = arrival
        self.unix_arrival = arrival + clock_offset()
        self.choices = choices
        self.ends = ends
        self.route = ""
        self.first_output = 0.0  # 0.0: there was none
        self.ended = 0.0
        self.error: Failure | None = None

    def fail(self, error: ApiError) -> None:
        """It ended by this. The error itself is not kept, which would keep the request alive."""
        self.error = Failure(error.status, error.body.code)

    def end(self, route: str) -> None:
        """It has ended, on this route, now."""
        self.route = route
        self.ended = time.monotonic()

    @property
    def status(self) -> Status:
        if self.error is not None:
            return "failed"
        return "finished" if len(self.ends) == self.choices else "aborted"

    def traced(self) -> TracedRequest:
        """For a trace, once it has ended."""
        ends = [self.ends.get(index) for index in range(self.choices)]
        choices = tuple(None if end is None else end.timings for end in ends)
        times = (self.arrival, self.first_output, self.ended)
        return TracedRequest(self.request_id, self.route, self.status, *times, choices)

    def timings(self) -> Timings:
        """For the request's own client."""
        tokenized = max((end.timings.tokenized for end in self.ends.values() if end.timings), default=0.0)
        return Timings(
            request_id=self.request_id,
            arrival=self.unix_arrival,
            tokenized_ms=self._after(tokenized),
            first_output_ms=self._after(self.first_output),
            choices=[self._choice(index, end) for index, end in sorted(self.ends.items())],
        )

    def record(self) -> RequestRecord:
        """For everybody, once it has ended."""
        return RequestRecord(
            **structs.asdict(self.timings()),
            route=self.route,
            status=self.status,
            error=self.error,
            ended_ms=self._milliseconds(self.ended),
        )

    def _milliseconds(self, moment: float) -> float:
        return round((moment - self.arrival) * 1e3, 3)

    def _after(self, moment: float) -> float | None:
        return self._milliseconds(moment) if moment else None

    def _choice(self, index: int, end: Finished) -> ChoiceTimings:
        told = end.timings or _UNTOLD
        scheduler = told.scheduler
        return ChoiceTimings(
            index,
            self._after(scheduler.queued),
            self._after(scheduler.first_scheduled),
            self._after(scheduler.first_token),
            self._after(scheduler.last_token),
            self._after(told.finished),
            [
                (self._milliseconds(start), self._milliseconds(ended), count)
                for start, ended, count in chunks_of(scheduler)
            ],
            scheduler.steps,
            scheduler.preemptions,
            end.cached_tokens,
            end.prompt_tokens,
            end.completion_tokens,
        )


class Timelines:
    """Those of the last `size` requests that ended, by their id; of several with one id the newest."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._by_id: dict[str, RequestTimeline] = {}  # the oldest first

    def add(self, timeline: RequestTimeline) -> None:
        if not self.size:
            return
        self._by_id.pop(timeline.request_id, None)
        self._by_id[timeline.request_id] = timeline
        if len(self._by_id) > self.size:
            del self._by_id[next(iter(self._by_id))]

    def get(self, request_id: str) -> RequestTimeline | None:
        return self._by_id.get(request_id)

    def newest(self, limit: int) -> list[RequestTimeline]:
        """Up to so many, the newest first."""
        return list(itertools.islice(reversed(self._by_id.values()), limit))
