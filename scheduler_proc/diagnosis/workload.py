"""What was asked of the engine in the window, and what came of it: numbers, no judgement."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pstdev

from scheduler_proc.cost_model import CostModel, StepShape
from scheduler_proc.diagnosis.what_if import Job, Load, Spread, spread
from scheduler_proc.diagnosis.window import Ended, Slice, Totals, Window

MAX_JOBS = 200  # that are replayed: the newest
_FEW_ARRIVALS = 8  # too few to say who sends them
_SOON = 0.2  # of the time between arrivals: a client sends its next request so soon after an end
_STEADY = 0.1  # of the requests in the engine: they vary by no more when a fixed number of clients sends them
_CONSTANT = 0.01  # of the time between arrivals: what varies by less does not vary
_CLEARLY = 0.5  # times as much: of two times that vary, the one that varies by less is the one that somebody keeps to


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Times in seconds, tokens and requests as counts; means are over requests unless said otherwise."""

    seconds: float  # that were looked at
    steps: Slice  # added up
    totals: Totals  # counted in the window
    load: Load
    arrived: int
    finished: int
    length_share: float  # of the last to finish, those cut at max_tokens
    outputs: tuple[int, int, int]  # tokens of the last to finish: median, 90th percentile, most
    first_tokens: int  # requests that got their first token, or still wait for it
    ttft: Spread  # from arrival at the scheduler; of those that wait yet, the time so far
    queue: float  # of that, before the first step
    own: float  # what computing its prompt takes without any others
    others: float  # the rest: other requests' tokens in the same steps, chunks, gaps
    itl: Spread
    throughput: float  # output tokens a second
    running: float  # mean over time
    waiting: float
    kv_share: float  # of the blocks, those in use by requests; mean over time
    spans: Sequence[tuple[int, int]]  # tokens of a request: prompt and outputs so far, and all that it may come to
    prompt: float  # tokens
    cached: float  # of them found in the prefix cache
    repeated: float  # of them that a cache without bounds would have held

    @property
    def busy(self) -> float:
        """Share of the time in which the device computed."""
        return min(1.0, self.steps.busy / self.seconds)

    @property
    def empty(self) -> float:
        """Share of the time without any request."""
        return min(self.totals.empty_seconds, max(0.0, self.seconds - self.steps.seconds)) / self.seconds

    @property
    def starved(self) -> float:
        """Share of the time in which there were requests and the device had no step."""
        return min(self.totals.starved_seconds, max(0.0, self.seconds - self.steps.seconds)) / self.seconds

    @property
    def overhead(self) -> float:
        """Seconds of a mean step in which the device did nothing."""
        return max(0.0, self.steps.seconds - self.steps.busy) / max(1, self.steps.steps)

    @property
    def limits(self) -> dict[str, float]:
        """Share of the requests' waiting by what kept them from starting."""
        total = math.fsum(self.steps.waits.values())
        return {name: seconds / total for name, seconds in self.steps.waits.items()} if total else {}


def facts_of(window: Window, live: Sequence[Ended], totals: Totals, cost: CostModel, now: float) -> Facts:
    """`live`: the requests that have not ended, as if they ended now; or the first and the last of them, where they are
    many. `totals`: the core's counters now.
    """
    steps = window.total(now)
    start = max(now - window.seconds, window.known_since)
    ended = [request for request in window.ended if request.ended >= start]
    recent = sorted(request.arrival for request in (*ended, *live) if request.arrival >= start)
    if len(recent) > MAX_JOBS:
        start = recent[-MAX_JOBS]
    finished = [request for request in ended if request.reason != "aborted"]
    lengths = sorted(request.outputs for request in finished)
    first = [request for request in (*ended, *live) if request.first_token >= start]
    waiting = [request for request in live if not request.first_token]
    # Of those that wait, those that have for longer than others took say most of the truth; the others will yet.
    typical = median(request.first_token - request.arrival for request in first) if first else 0.0
    late = [request for request in waiting if now - request.arrival > typical]
    times = [(request.first_token or now) - request.arrival for request in (*first, *late)]
    queued = [(request.started or now) - request.arrival for request in (*first, *late)]
    own = fmean(_own(request, cost) for request in first) if first else 0.0
    queue = fmean(queued) if queued else 0.0
    ttft = spread([(time, 1.0) for time in times])
    seconds = max(1e-3, min(window.seconds, now - steps.since))
    counted = totals.since(steps.before)
    both = [*ended, *live]
    return Facts(
        seconds=seconds,
        steps=steps,
        totals=counted,
        load=_load(both, live, start, now, fmean(lengths) if lengths else 0.0),
        arrived=counted.arrived,
        finished=counted.finished,
        length_share=sum(request.reason == "length" for request in finished) / max(1, len(finished)),
        outputs=(_quantile(lengths, 0.5), _quantile(lengths, 0.9), _quantile(lengths, 1.0)),
        first_tokens=len(times),
        ttft=ttft,
        queue=queue,
        own=own,
        others=max(0.0, ttft.mean - queue - own),
        itl=steps.itl,
        throughput=counted.generated_tokens / seconds,
        running=steps.running / seconds,
        waiting=steps.waiting / seconds,
        kv_share=steps.kv / max(1e-9, steps.seconds),
        spans=[(request.prompt + request.outputs, request.prompt + request.most) for request in both],
        prompt=fmean(request.prompt for request in both) if both else 0.0,
        cached=fmean(request.cached for request in both if request.started) if any(r.started for r in both) else 0.0,
        repeated=fmean(request.repeated for request in both) if both else 0.0,
    )


def _quantile(ordered: Sequence[int], share: float) -> int:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


def _own(request: Ended, cost: CostModel) -> float:
    """Seconds that its prompt takes in one step of its own."""
    return cost.predict(StepShape().with_chunk(request.cached, request.prompt - request.cached))


# --- the load, for replays ---


def _load(requests: list[Ended], live: Sequence[Ended], start: float, now: float, mean_outputs: float) -> Load:
    """Who arrived from `start` on, and who was running then, for what is left of it.

    Not who waited then, unless a fixed number of clients sends: under other settings there might have been no queue.
    """
    unfinished = {id(request) for request in live}
    clients, think = _clients(requests, live, start)
    hits = sum(request.cached for request in requests) / max(1, sum(r.repeated for r in requests if r.started))
    jobs = []
    for request in requests:
        outputs = request.outputs
        if id(request) in unfinished:
            outputs = min(request.most, max(outputs + 1, round(mean_outputs)))
        elif not request.first_token:
            continue  # aborted before it came to anything
        if request.first_token and request.first_token < start:
            jobs.append(_rest(request, start, outputs))
        elif request.arrival >= start or clients or 0 < request.started < start:
            jobs.append(
                Job(
                    max(request.arrival, start),
                    request.prompt,
                    request.cached if request.started else int(request.repeated * min(1.0, hits)),
                    max(1, outputs),
                    max(request.most, outputs),
                    request.cached,
                    repeated=request.repeated,
                )
            )
    jobs.sort(key=lambda job: job.arrival)
    return Load(jobs, now, clients, think)


def _rest(request: Ended, start: float, outputs: int) -> Job:
    """What a request that was decoding at `start` had still to do: it needs no prefill, but its blocks."""
    share = (start - request.first_token) / max(1e-9, request.ended - request.first_token)
    done = min(outputs - 1, int(request.outputs * min(1.0, share)))
    known = request.prompt + done
    return Job(start, known, known - 1, outputs - done, request.most - done, request.cached, counts=False)


def _clients(requests: Sequence[Ended], live: Sequence[Ended], start: float) -> tuple[int, float]:
    """How many clients send one request after another, and how long each waits before its next; 0: it is not so.

    Who sends when an answer has come keeps to a time after ends; who sends by the clock, or by chance, does not, even
    if no two requests meet and there is always one in the engine.
    """
    arrivals = sorted(request.arrival for request in requests)
    unfinished = {id(request) for request in live}
    ends = sorted(request.ended for request in requests if id(request) not in unfinished)
    gaps, inside = [], []
    for arrival in arrivals:
        if arrival >= start and ends and ends[0] <= arrival:
            gaps.append(arrival - ends[bisect_right(ends, arrival) - 1])
            inside.append(bisect_right(arrivals, arrival) - bisect_right(ends, arrival))
    if len(gaps) < _FEW_ARRIVALS:
        return 0, 0.0
    think = median(gaps)
    recent = arrivals[bisect_left(arrivals, start) :]
    between = (recent[-1] - recent[0]) / len(gaps)
    # Not the first ones: they may be a load that is beginning.
    inside = inside[len(inside) // 4 :]
    after_ends, apart = pstdev(gaps), pstdev(later - earlier for earlier, later in pairwise(recent))
    by_clock = apart < _CLEARLY * after_ends and after_ends > _CONSTANT * between
    soon = think < _SOON * between and not by_clock
    steady = max(inside) - min(inside) <= int(_STEADY * max(inside)) and after_ends < _CLEARLY * apart
    return (max(1, round(median(inside))), think) if soon or steady else (0, 0.0)
