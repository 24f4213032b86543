"""What the engine did in the last half minute: what a diagnosis is made of.

The core tells of every step and of every end of a request; nothing here is done for a single token. Memory is bounded:
some 30 slices of a second with sums, the last 512 requests that ended, one histogram of gaps a slice. How many requests
arrived and ended is counted apart from those that are kept.
"""

import math
import operator
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ipc.messages import FinishReason
from scheduler_proc.cost_model import StepShape
from scheduler_proc.diagnosis.repeats import Repeats
from scheduler_proc.diagnosis.what_if import Spread, spread
from scheduler_proc.planner import Step
from scheduler_proc.request import Request

SECONDS = 30.0
MAX_ENDED = 512  # requests
_SLICE_SECONDS = 1.0
_GAP_RATIO = math.log(1.02)  # gaps within 2% of each other are counted as equal

EndReason = FinishReason | Literal["aborted"]


class Ended(NamedTuple):
    """A request that has ended. Times are seconds on the clock of the core's events; 0.0: it has not come to that."""

    arrival: float
    started: float
    first_token: float
    ended: float
    prompt: int  # tokens
    cached: int  # of them found in the prefix cache
    repeated: int  # of them that a prefix cache without bounds would have held
    outputs: int
    most: int  # outputs that it might have had
    preemptions: int
    tenant: str
    reason: EndReason


class Totals(NamedTuple):
    """Counters of the core since its start."""

    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    evicted_blocks: int = 0
    refused: int = 0
    aborted: int = 0
    empty_seconds: float = 0.0  # without a step in flight, and without requests
    starved_seconds: float = 0.0  # without a step in flight, although there were requests
    arrived: int = 0  # requests that were taken
    finished: int = 0

    def since(self, before: "Totals") -> "Totals":
        """What was counted from then on."""
        return Totals(*map(operator.sub, self, before))


class State(NamedTuple):
    """The engine at the end of a step."""

    running: int
    waiting: int
    kv_share: float  # of the blocks, those that running requests use
    totals: Totals


@dataclass(slots=True)
class Slice:
    """A second or so. Seconds are those from the end of one step to the end of the next, while any is in flight."""

    start: float
    since: float  # when the step before its first one ended, or its first one was planned
    before: Totals  # then
    steps: int = 0
    prefill_steps: int = 0
    seconds: float = 0.0
    busy: float = 0.0  # of those, the ones in which the device computed
    prefill_tokens: int = 0
    prefill_context: float = 0.0
    decode_rows: int = 0
    context_tokens: int = 0
    running: float = 0.0  # request-seconds
    waiting: float = 0.0
    kv: float = 0.0  # shares times seconds
    waits: dict[str, float] = field(default_factory=dict)  # request-seconds of waiting by what limited the step
    limits: dict[str, float] = field(default_factory=dict)  # seconds of steps by what limited them
    gaps: dict[int, int] = field(default_factory=dict)  # between tokens: logarithms in units of `_GAP_RATIO`

    def add(self, other: "Slice") -> None:
        """Take in a later slice."""
        for name in (
            "steps",
            "prefill_steps",
            "seconds",
            "busy",
            "prefill_tokens",
            "prefill_context",
            "decode_rows",
            "context_tokens",
            "running",
            "waiting",
            "kv",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.waits, other.waits), (self.limits, other.limits)):
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0.0) + value
        for bucket, count in other.gaps.items():
            self.gaps[bucket] = self.gaps.get(bucket, 0) + count

    def count_gaps(self, seconds: float, count: int) -> None:
        """So many requests have waited for so long for a token after the one before."""
        if count:
            bucket = round(math.log(max(1e-6, seconds)) / _GAP_RATIO)
            self.gaps[bucket] = self.gaps.get(bucket, 0) + count

    @property
    def shape(self) -> StepShape:
        """All steps' shapes, added up."""
        return StepShape(self.prefill_tokens, self.prefill_context, self.decode_rows, self.context_tokens)

    @property
    def itl(self) -> Spread:
        """Of the gaps between two tokens of a request, to 1%."""
        return spread([(math.exp(bucket * _GAP_RATIO), count) for bucket, count in self.gaps.items()])


class Window:
    """Collects; `workload` looks at it."""

    def __init__(self, block_size: int, seconds: float = SECONDS) -> None:
        """`seconds`: how far back it looks."""
        self.seconds = seconds
        self.ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._repeats = Repeats(block_size)
        self._slices: deque[Slice] = deque()
        self._step_ended = -math.inf
        self._token_at = 0.0  # when the decoding requests got their last token,
        self._later: list[float] = []  # but for those that got their first one since, with --prefer prefill: then
        self._totals = Totals()

    @property
    def known_since(self) -> float:
        """All requests that ended after this are kept."""
        return self.ended[0].ended if len(self.ended) == MAX_ENDED else -math.inf

    def arrive(self, request: Request) -> None:
        """A request has been taken."""
        request.repeated = self._repeats.take(request.tokens, request.namespace)

    def end(self, request: Request, now: float, reason: EndReason) -> None:
        """It has ended so."""
        self.ended.append(ended(request, now, reason))

    def step_done(self, step: Step, now: float, busy: float, state: State) -> None:
        """A step has come back that kept the device busy for so many seconds."""
        part = self._slice(now, step.planned)
        seconds = max(0.0, now - max(self._step_ended, step.planned))
        self._step_ended = now
        part.steps += 1
        part.seconds += seconds
        part.busy += min(busy, seconds)
        part.running += seconds * state.running
        part.waiting += seconds * state.waiting
        part.kv += seconds * state.kv_share
        limit = step.limit
        part.limits[limit] = part.limits.get(limit, 0.0) + seconds
        if state.waiting:
            part.waits[limit] = part.waits.get(limit, 0.0) + seconds * state.waiting
        if step.prefills:
            part.prefill_steps += 1
            part.prefill_tokens += step.prefill_tokens
            part.prefill_context += step.prefill_context
        part.context_tokens += step.decode_context + step.chunk_context
        if rows := len(step.decodes):
            part.decode_rows += rows
            later = self._later[:rows]  # some may have ended at once
            part.count_gaps(now - self._token_at, rows - len(later))
            for token_at in later:
                part.count_gaps(now - token_at, 1)
        if rows or limit != "prefer":  # else decoding requests have been left out, and still wait for theirs
            self._token_at = now
            self._later.clear()
        else:
            self._later += [now] * sum(sample for _, sample in step.prefills)
        self._totals = state.totals

    def _slice(self, now: float, planned: float) -> Slice:
        slices = self._slices
        if not slices or now - slices[-1].start >= _SLICE_SECONDS:
            since = self._step_ended if math.isfinite(self._step_ended) else planned
            slices.append(Slice(now, since, self._totals))
        while now - slices[0].start > self.seconds + _SLICE_SECONDS:
            slices.popleft()
        return slices[-1]

    def total(self, now: float) -> Slice:
        """The sum of the slices that began within the window."""
        recent = [part for part in self._slices if now - part.start <= self.seconds]
        if not recent:
            return Slice(now, now - self.seconds, self._totals)
        total = Slice(recent[0].start, recent[0].since, recent[0].before)
        for part in recent:
            total.add(part)
        return total


def ended(request: Request, now: float, reason: EndReason) -> Ended:
    """What is kept of a request, as if it ended now."""
    timeline = request.timeline
    assert timeline is not None  # whoever has a window has timelines
    return Ended(
        request.arrival,
        timeline.first_scheduled,
        timeline.first_token,
        now,
        request.num_prompt,
        max(0, request.cached_tokens),
        request.repeated,
        request.num_outputs,
        request.last + 1 - request.num_prompt,
        request.preemptions,
        request.tenant,
        reason,
    )
