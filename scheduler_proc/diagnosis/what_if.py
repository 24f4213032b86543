"""How the last requests would have fared under other settings: a quick model of the planner with the fitted costs.

It keeps what decides latencies (rows, tokens of a step, chunks, blocks, long prompts, the order of arrival, steps that
are planned one ahead) and leaves out what does not: which block holds what, policies other than first come first
served, rows that end early. Steps that only decode are taken many at a time, so a replay costs as much as there are
requests and chunks, not as there are tokens. `tests/sim/test_what_if.py` holds it against the scheduler core itself.
"""

import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from scheduler_proc.cost_model import CostModel, StepShape

PIECE = 25  # steps, or runs of steps that only decode, between two yields

_LEAST_PROMPT_TOKENS = 4  # as the planner's, of a step that has no time for any


class Job(NamedTuple):
    """One request of the window."""

    arrival: float  # seconds
    prompt: int  # tokens
    cached: int  # of them that need no computing
    outputs: int  # tokens, at least 1
    most: int  # outputs that it may have
    shared: int = 0  # prompt tokens whose blocks others hold as well
    counts: bool = True  # its first token is one of the load's; else it had come before
    repeated: int = 0  # prompt tokens that a prefix cache without bounds would have held


class Load(NamedTuple):
    """What is asked of the engine."""

    jobs: Sequence[Job]  # by arrival
    until: float = math.inf  # seconds: the end of the look; who waits then has waited for so long at least
    clients: int = 0  # that many send their next request when one has ended; 0: requests arrive at their times
    think: float = 0.0  # seconds between the end of one and the next, with `clients`


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings that a replay heeds, and what a step costs."""

    max_seqs: int
    max_step_tokens: int
    prefill_chunk: int
    num_blocks: int
    block_size: int
    long_prompt_tokens: int
    max_long_prefills: int
    long_step_share: float
    prefer: str
    waits_for_blocks: bool  # --kv-shortage wait
    max_itl: float | None  # seconds, less the margin that the planner keeps
    cost: tuple[float, ...]  # as `CostModel.coefficients`
    overhead: float = 0.0  # seconds of a step in which the device has nothing to do
    batch_wait: float = 0.0  # seconds that an idle engine waits for max_seqs requests to start together


class Spread(NamedTuple):
    """Of a latency, in seconds."""

    mean: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay found."""

    ttft: Spread
    itl: Spread
    throughput: float  # output tokens a second, from the first arrival to the last end
    running: float  # requests, the mean over the time in which any ran
    preemptions: int


def spread(values: Sequence[tuple[float, float]]) -> Spread:
    """Mean, 99th percentile and largest of (value, weight); zeros for none."""
    ordered = sorted(value for value in values if value[1] > 0)
    total = math.fsum(weight for _, weight in ordered)
    if not total:
        return Spread(0.0, 0.0, 0.0)
    seen, p99 = 0.0, ordered[-1][0]
    for value, weight in ordered:
        seen += weight
        if seen >= 0.99 * total:
            p99 = value
            break
    return Spread(math.fsum(value * weight for value, weight in ordered) / total, p99, ordered[-1][0])


class _Row:
    """A job that is running, or waits to."""

    __slots__ = (
        "arrival",
        "done",
        "ends",
        "held",
        "is_long",
        "job",
        "joined",
        "left",
        "lost_at",
        "number",
        "position",
        "running",
    )

    def __init__(self, number: int, job: Job, arrival: float, is_long: bool) -> None:
        self.number = number
        self.job = job
        self.arrival = arrival
        self.is_long = is_long
        self.done = 0  # outputs so far
        self.lost_at = 0.0  # when it was preempted, if it was
        self.position = 0  # tokens computed or taken from the cache, when it last joined a list
        self.left = 0  # prompt tokens to compute
        self.held = 0  # blocks
        self.joined = 0  # the decode steps so far when it began to decode,
        self.ends = 0  # and when it ends
        self.running = False


class Replay:
    """One run of a load under one setup."""

    def __init__(self, load: Load, setup: Setup) -> None:
        self._setup = setup
        self._cost = CostModel.from_coefficients(setup.cost)
        self._load = load
        first = len(load.jobs) if not load.clients else min(load.clients, len(load.jobs))
        self._arriving = [(job.arrival, number) for number, job in enumerate(load.jobs[:first])]
        heapq.heapify(self._arriving)
        self._next = first
        self._shorts: deque[_Row] = deque()
        self._longs: deque[_Row] = deque()
        self._prefilling: list[_Row] = []
        self._decoding: list[tuple[int, int, _Row]] = []  # a heap by their end; some have been preempted since
        self._rows = 0  # that decode
        self._context = 0  # of those, together
        self._steps = 0  # that decoded
        self._grown = 0  # tokens that the decoding ones have got since they began to
        self._held = 0  # blocks of running ones when they started
        self._ended: list[_Row] = []  # they hold their row and blocks until the next step is planned
        self._pool = setup.num_blocks - max((job.shared for job in load.jobs), default=0) // setup.block_size
        self._since_decode = 0.0
        self._later: list[float] = []  # of that when rows joined which have not decoded since
        self._ttfts: list[tuple[float, float]] = []
        self._gaps: list[tuple[float, float]] = []
        self._outputs = 0
        self._busy = 0.0
        self._row_seconds = 0.0
        self._preemptions = 0

    def run(self) -> Generator[None, None, Outcome]:
        """Yields between pieces of work."""
        start = now = planned = self._arriving[0][0] if self._arriving else 0.0
        count = 0
        while now < self._load.until:
            if not (self._prefilling or self._rows):
                self._release()
                if not self._waiting:
                    if not self._arriving:
                        break
                    now = max(now, self._arriving[0][0])
                planned = now = self._filled(now)
            self._arrive(planned)
            # Planned while the step before runs: what arrives or ends meanwhile is for the one after.
            now, planned = self._step(now), now
            count += 1
            if count % PIECE == 0:
                yield
        now = min(now, self._load.until)
        self._count_late(now)
        seconds = now - start
        return Outcome(
            spread(self._ttfts),
            spread(self._gaps),
            self._outputs / seconds if seconds > 0 else 0.0,
            self._row_seconds / self._busy if self._busy > 0 else 0.0,
            self._preemptions,
        )

    def _count_late(self, now: float) -> None:
        """Who has waited longer than others did, and waits yet, has waited for so long."""
        typical = median(time for time, _ in self._ttfts) if self._ttfts else 0.0
        for row in (*self._shorts, *self._longs, *self._prefilling):
            if row.job.counts and not row.done and now - row.arrival > typical:
                self._ttfts.append((now - row.arrival, 1.0))

    @property
    def _waiting(self) -> int:
        return len(self._shorts) + len(self._longs)

    def _arrive(self, now: float) -> None:
        while self._arriving and self._arriving[0][0] <= now:
            arrival, number = heapq.heappop(self._arriving)
            job = self._load.jobs[number]
            is_long = job.prompt > self._setup.long_prompt_tokens
            (self._longs if is_long else self._shorts).append(_Row(number, job, arrival, is_long))

    def _filled(self, now: float) -> float:
        """When an idle engine starts a batch: it waits for more until its first request has waited for long enough."""
        self._arrive(now)
        waiting = [queue[0].arrival for queue in (self._shorts, self._longs) if queue]
        start = max(now, min(waiting) + self._setup.batch_wait)
        while now < start and self._waiting < self._setup.max_seqs:
            now = min(start, self._arriving[0][0]) if self._arriving else start
            self._arrive(now)
        return now

    # --- one step ---

    def _step(self, now: float) -> float:
        """Plan one, or several that only decode, and carry them out; returns when they end."""
        setup = self._setup
        decodes = self._rows
        given: list[tuple[_Row, int]] = []
        if setup.prefer != "decode" or not decodes:
            room = setup.max_step_tokens - (0 if setup.prefer == "prefill" else decodes)
            given = self._prefill(self._within_itl(room))
        self._release()
        if not given and decodes:
            return self._decode(now)
        if setup.prefer == "prefill":
            decodes = 0
        shape = StepShape(decode_rows=decodes, context_tokens=self._context if decodes else 0)
        for row, count in given:
            shape = shape.with_chunk(row.position, count)
            row.position += count
            row.left -= count
        seconds = self._cost.predict(shape) + setup.overhead
        self._pass_time(seconds)
        if decodes:
            self._take_tokens(1, seconds)
        end = now + seconds
        for row, _ in given:
            if not row.left:
                self._prefilled(row, end)
        self._end_rows(end)
        self._keep_to_pool(end)
        return end

    def _within_itl(self, room: int) -> int:
        limit = self._setup.max_itl
        if limit is None or not self._rows:
            return room
        decodes = StepShape(decode_rows=self._rows, context_tokens=self._context)
        start = max((row.position for row in self._prefilling), default=0)
        return min(room, max(_LEAST_PROMPT_TOKENS, self._cost.affordable_prefill_tokens(limit, decodes, start, room)))

    def _prefill(self, budget: int) -> list[tuple[_Row, int]]:
        """What a step computes of prompts: rows and their tokens, shared out as the planner does."""
        given: list[tuple[_Row, int]] = []
        if budget <= 0:
            return given
        longs = [row for row in self._prefilling if row.is_long]
        kept = self._share_of_longs(budget, longs)
        left = budget - kept
        for running in self._prefilling:
            if not running.is_long:
                left -= self._give(running, left, given)
        places = self._places()
        while places > 0 and left > 0 and (row := self._first(longs)) is not None and self._start(row):
            places -= 1
            if row.is_long:
                longs.append(row)
                more = self._share_of_longs(budget, longs)
                left -= more - kept
                kept = more
            else:
                left -= self._give(row, left, given)
        spent = sum(count for _, count in given)
        for long in longs:
            spent += self._give(long, budget - spent, given)
        return given

    def _give(self, row: _Row, budget: int, given: list[tuple[_Row, int]]) -> int:
        count = min(row.left, self._setup.prefill_chunk, budget)
        if count <= 0:
            return 0
        position, block_size = row.position, self._setup.block_size
        if count < row.left and (count >= 4 * block_size or given):
            count -= min((position + count) % block_size, count)
        if count > 0:
            given.append((row, count))
        return count

    def _share_of_longs(self, budget: int, longs: list[_Row]) -> int:
        missing = sum(row.left for row in longs)
        return min(max(1, int(budget * self._setup.long_step_share)), missing) if budget > 1 else 0

    def _places(self) -> int:
        running = len(self._prefilling) + self._rows
        most = self._setup.max_seqs - len(self._ended)
        if self._setup.max_itl is not None:
            context = self._context / max(1, self._rows)
            most = min(most, max(1, self._cost.max_decode_rows(self._setup.max_itl, context)))
        return most - running

    def _first(self, longs: list[_Row]) -> _Row | None:
        queues = [self._shorts]
        if len(longs) < self._setup.max_long_prefills:
            queues.append(self._longs)
        return min((queue[0] for queue in queues if queue), key=lambda row: (row.arrival, row.number), default=None)

    @property
    def _used(self) -> float:
        return self._held + (0 if self._setup.waits_for_blocks else self._grown / self._setup.block_size)

    def _start(self, row: _Row) -> bool:
        """Give a waiting row its blocks; False when there are too few."""
        setup, job = self._setup, row.job
        known = job.prompt + row.done
        last = job.prompt + job.most if setup.waits_for_blocks else known
        held = -(-last // setup.block_size) - job.shared // setup.block_size
        running = len(self._prefilling) + self._rows
        reserve = 0 if setup.waits_for_blocks else running
        if (running or self._ended) and self._used + held + reserve > self._pool:
            return False
        (self._longs if row.is_long else self._shorts).popleft()
        row.held, row.position, row.left = held, job.cached, max(1, known - job.cached)
        row.running = True
        self._held += held
        self._prefilling.append(row)
        return True

    def _decode(self, now: float) -> float:
        """As many steps as nothing else can happen in; returns when they end."""
        rows, setup = self._rows, self._setup
        base, _, per_row, per_context, _ = setup.cost
        step = base + per_row * rows + setup.overhead
        steps = self._decoding[0][0] - self._steps
        if not setup.waits_for_blocks:
            steps = min(steps, int((self._pool - self._used) * setup.block_size / rows))
        if self._waiting:
            steps = 1 if self._ended else min(steps, 16)  # places may come; the ITL limit looks at the context
        if self._arriving:
            steps = min(steps, int((self._arriving[0][0] - now) / (step + per_context * self._context)) + 1)
        steps = max(1, steps)
        seconds = steps * step + per_context * (self._context * steps + rows * steps * (steps - 1) / 2)
        self._pass_time(seconds)
        self._take_tokens(steps, seconds)
        end = now + seconds
        self._end_rows(end)
        self._keep_to_pool(end)
        return end

    # --- what comes of it ---

    def _pass_time(self, seconds: float) -> None:
        self._busy += seconds
        self._row_seconds += seconds * (len(self._prefilling) + self._rows)
        self._since_decode += seconds

    def _take_tokens(self, steps: int, seconds: float) -> None:
        rows = self._rows
        waited, each = self._since_decode - seconds, seconds / steps  # first, in steps of prompts alone
        later = self._later[:rows]  # some may have lost their blocks
        self._gaps += [(waited - joined + each, 1) for joined in later]
        self._gaps += [(waited + each, rows - len(later)), (each, rows * (steps - 1))]
        self._later.clear()
        self._since_decode = 0.0
        self._outputs += rows * steps
        self._steps += steps
        self._context += rows * steps
        self._grown += rows * steps

    def _prefilled(self, row: _Row, now: float) -> None:
        """Its last prompt token has been computed, and a token sampled."""
        self._prefilling.remove(row)
        if row.done:
            self._gaps.append((now - row.lost_at, 1.0))
        elif row.job.counts:
            self._ttfts.append((now - row.arrival, 1.0))
        row.done += 1
        self._outputs += 1
        if row.done >= row.job.outputs:
            self._end(row, now)
            return
        if not self._rows:
            self._since_decode = 0.0
            self._later.clear()
        self._later.append(self._since_decode)
        self._rows += 1
        self._context += row.position
        row.joined, row.ends = self._steps, self._steps + row.job.outputs - row.done
        heapq.heappush(self._decoding, (row.ends, row.number, row))

    def _end_rows(self, now: float) -> None:
        while self._decoding and (not self._decoding[0][2].running or self._decoding[0][0] <= self._steps):
            ends, _, row = heapq.heappop(self._decoding)
            if row.running and ends == row.ends:
                self._leave(row)
                self._end(row, now)

    def _leave(self, row: _Row) -> int:
        """It decodes no more; returns the tokens that it has got by that."""
        got = self._steps - row.joined
        self._rows -= 1
        self._context -= row.position + got
        self._grown -= got
        if not self._setup.waits_for_blocks:
            row.held += got // self._setup.block_size
            self._held += got // self._setup.block_size
        return got

    def _end(self, row: _Row, now: float) -> None:
        row.running = False
        self._ended.append(row)
        if self._load.clients and self._next < len(self._load.jobs):
            heapq.heappush(self._arriving, (now + self._load.think, self._next))
            self._next += 1

    def _release(self) -> None:
        self._held -= sum(row.held for row in self._ended)
        self._ended.clear()

    def _keep_to_pool(self, now: float) -> None:
        """Preempt the last ones until the others can go on for a step; the first one always can."""
        if self._setup.waits_for_blocks:
            return
        room = self._pool + sum(row.held for row in self._ended)
        while self._rows > 1 and self._used + self._rows / self._setup.block_size > room:
            decoding = [row for ends, _, row in self._decoding if row.running and ends == row.ends]
            row = max(decoding + self._prefilling, key=lambda row: row.number)
            if row in self._prefilling:
                self._prefilling.remove(row)
            else:
                row.done += self._leave(row)
                row.lost_at = now
            row.running = False
            row.ends = -1
            self._held -= row.held
            self._preemptions += 1
            (self._longs if row.is_long else self._shorts).appendleft(row)
