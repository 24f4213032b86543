"""Chooses what the next step computes: which requests, how many tokens of each.

One rule for prefill, chunked prefill, prefix hits and decode: a running request is given tokens until it has caught up.
Decoding rows take one token each, first; prompts share the rest of the step, those that run already before new ones,
long ones within their share. What is not decided here: the order of waiting requests (`policies`), which block holds
what (`kv_manager`), how long a step takes (`cost_model`), when a batch may start (`batching`).
"""

import math
from bisect import insort

from config.schema import SchedulerConfig
from ipc.stats_messages import StepLimit
from scheduler_proc.batching import BatchGate
from scheduler_proc.cost_model import CostModel, StepShape
from scheduler_proc.kv_manager import Growth, KVManager
from scheduler_proc.policies import make_policy
from scheduler_proc.policies.base import Policy
from scheduler_proc.request import Request, State

_LEAST_PROMPT_TOKENS = 4  # of a step that has no time for any: else a prompt would wait for all streams to end
_ALIGNED_BLOCKS = 4  # chunks of so many blocks end with a whole one
_SCORED_CHUNK = 128  # prompt tokens: each whose log-probability is wanted takes a pass over the whole vocabulary


class Step:
    """What was decided for one step; `core` turns it into a `StepPlan`."""

    __slots__ = (
        "admitted",
        "chunk_context",
        "columns",
        "decode_context",
        "decodes",
        "freed_rows",
        "grown",
        "limit",
        "number",
        "planned",
        "preempted",
        "prefill_context",
        "prefill_tokens",
        "prefills",
        "wake_at",
    )

    def __init__(self, number: int, planned: float) -> None:
        self.number = number
        self.planned = planned  # when, in seconds on the clock of the core's events
        self.decodes: list[Request] = []
        self.prefills: list[tuple[Request, bool]] = []  # and whether its next token is sampled
        self.columns: list[int] = []  # row, start, count, sample of each of the above, in order
        self.admitted: list[Request] = []
        self.grown: list[int] = []  # row, index in its block table, block id
        self.freed_rows: list[int] = []  # of preempted requests
        self.preempted = False
        self.decode_context = 0  # tokens before the positions of the decodes,
        self.chunk_context = 0  # and before the chunks
        self.prefill_tokens = 0
        self.prefill_context = 0.0
        self.wake_at: float | None = None
        self.limit: StepLimit = "nothing"  # what kept more out of it

    @property
    def shape(self) -> StepShape:
        return StepShape(
            self.prefill_tokens, self.prefill_context, len(self.decodes), self.decode_context + self.chunk_context
        )


def _key(request: Request) -> tuple[float, int]:
    return request.key


class Planner:
    """The waiting and the running requests. Holds no step in flight and sends nothing."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, cost: CostModel, gate: BatchGate) -> None:
        assert config.max_seqs is not None
        assert config.max_step_tokens is not None
        assert config.prefill_chunk is not None
        self._config = config
        self._max_seqs = config.max_seqs
        self._max_step_tokens = config.max_step_tokens
        self._prefill_chunk = config.prefill_chunk
        self._max_itl = None if config.max_itl_ms is None else config.max_itl_ms / 1e3
        self._long_blocks = int(config.long_pool_share * kv.pool.total)
        self._kv = kv
        self._cost = cost
        self._gate = gate
        self.policy = make_policy(config, kv.cached_tokens)
        self._charges = type(self.policy).served is not Policy.served
        self._free_rows: list[int] = []
        self.prefilling: list[Request] = []  # by their key, as are
        self.decoding: list[Request] = []
        self.num_preemptions = 0
        self.recomputed_tokens = 0
        self._new_rows()

    def _new_rows(self) -> None:
        self._free_rows = list(range(self._max_seqs - 1, -1, -1))

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def free_rows(self) -> int:
        """Requests that could start at this moment as far as rows and the ITL limit go."""
        return max(0, min(len(self._free_rows), self._row_limit() - self.num_running))

    @property
    def decode_context(self) -> int:
        """Tokens of context of the decoding requests together."""
        return sum(request.num_planned for request in self.decoding)

    @property
    def missing_tokens(self) -> int:
        """Prompt tokens of running requests that no step has been given yet."""
        return sum(request.num_known - request.num_planned for request in self.prefilling)

    def start_delay(self, now: float) -> float:
        """Seconds that a request that arrives now waits for a batch to fill, should nobody else come.

        0 where time alone does not end that.
        """
        if self.num_running:
            return 0.0
        oldest = min((request.arrival for request in self.policy), default=now)
        return self._delay(now, len(self.policy) + 1, oldest)

    @property
    def idle_delay(self) -> float:
        """The same with nothing running or waiting."""
        return self._delay(0.0, 1, 0.0)

    def _delay(self, now: float, waiting: int, oldest: float) -> float:
        delay = self._gate.delay(now, waiting, oldest)
        return delay if math.isfinite(delay) else 0.0

    def add(self, request: Request) -> None:
        """A new request joins the queue."""
        request.is_long = request.num_prompt > self._config.long_prompt_tokens
        self.policy.add(request)

    def remove(self, request: Request) -> int | None:
        """Forget a request that has ended, wherever it is; returns the row it held."""
        row = None
        if request.state is State.WAITING:
            self.policy.remove(request)
        else:
            self._running_list(request).remove(request)
            row = self._vacate(request, swap_out=False)
        request.state = State.ENDED
        return row

    def _running_list(self, request: Request) -> list[Request]:
        return self.prefilling if request.num_planned < request.num_known else self.decoding

    def _vacate(self, request: Request, *, swap_out: bool) -> int:
        row = request.row
        self._kv.release(request, swap_out=swap_out)
        self._free_rows.append(row)
        request.row = -1
        return row

    def reset(self, first_valid_step: int) -> list[Request]:
        """All KV and all rows are lost: every running request waits again, at its old place. Returns those."""
        running = self.prefilling + self.decoding
        for request in running:
            request.lost_positions = request.num_planned
        self._kv.reset(running)
        for request in running:
            request.row = -1
            self._wait_again(request, first_valid_step)
        self.prefilling, self.decoding = [], []
        self._new_rows()
        return running

    def _wait_again(self, request: Request, first_valid_step: int) -> None:
        request.state = State.WAITING
        request.first_valid_step = first_valid_step
        request.preemptions += 1
        self.policy.add(request)

    # --- one step ---

    def plan(self, number: int, now: float) -> Step:
        """Decide step `number` at time `now`; it may turn out empty."""
        step = Step(number, now)
        self._kv.begin_plan(number)
        if self._config.prefer == "prefill":
            self._prefill(step, self._max_step_tokens, now)
            if not step.prefills:
                self._decode(step)
            elif self.decoding:
                step.limit = "prefer"
        else:
            self._decode(step)
            if self._config.prefer == "mixed" or not step.decodes:
                self._prefill(step, self._max_step_tokens - len(step.decodes), now)
            elif self.prefilling or len(self.policy):
                step.limit = "prefer"
        if self._charges:
            for request in step.decodes:
                self.policy.served(request, 1)
        return step

    # --- decode ---

    def _decode(self, step: Step) -> None:
        """One position for every decoding request, in the order in which they are preempted last."""
        context = 0
        decodes, columns = step.decodes, step.columns
        for request in list(self.decoding):
            position = request.num_planned
            if position >= request.last or request.row < 0:
                continue  # its last output is being sampled, or it was preempted for one before it
            if position >= request.capacity and not self._grow(request, step):
                continue
            request.num_planned = position + 1
            decodes.append(request)
            columns += (request.row, position, 1, 1)
            context += position
        step.decode_context = context

    def _grow(self, request: Request, step: Step) -> bool:
        """Give a decoding request a block for its next position, at the cost of those behind it if need be."""
        while True:
            match self._kv.grow(request):
                case Growth.GROWN:
                    table = request.block_table
                    step.grown += (request.row, len(table) - 1, table[-1])
                    return True
                case Growth.LATER:
                    return False
            victim = self._last_running()
            if victim is not request:
                self._preempt(victim, step)
            elif self.num_running > 1 or not self._kv.pins.release_first():
                return False  # the last one waits for those before it to end

    def _last_running(self) -> Request:
        if not self.prefilling:
            return self.decoding[-1]
        return max(self.decoding[-1], self.prefilling[-1], key=_key)

    def _preempt(self, request: Request, step: Step) -> None:
        """Take everything from a running request; it waits again at its old place."""
        self._running_list(request).remove(request)
        request.lost_positions = request.num_planned
        step.freed_rows.append(self._vacate(request, swap_out=self._config.kv_shortage == "swap"))
        self._wait_again(request, step.number)
        step.preempted = True
        self.num_preemptions += 1

    # --- prefill ---

    def _prefill(self, step: Step, budget: int, now: float) -> None:
        """Share up to `budget` tokens among prompts: running short ones, new ones, and the long ones' part."""
        within_itl = self._prompt_limit(step)
        out_of_tokens: StepLimit = "max_itl_ms" if within_itl < budget else "max_step_tokens"
        budget = min(budget, within_itl)
        longs = [request for request in self.prefilling if request.is_long]
        left = budget - self._share_of_longs(budget, longs)  # for short prompts
        for request in [request for request in self.prefilling if not request.is_long]:
            left -= self._give(request, left, step, now)
        if not step.preempted:  # what was just taken from one request is not for a newcomer
            self._admit(step, budget, left, longs, now)
        for request in longs:
            self._give(request, budget - step.prefill_tokens, step, now)
        if step.preempted:
            step.limit = "kv_blocks"
        elif step.limit == "max_step_tokens":
            step.limit = out_of_tokens
        elif step.limit == "nothing" and self.missing_tokens:
            if budget - step.prefill_tokens < self._config.block_size:
                step.limit = out_of_tokens
            else:
                cut = any(request.num_planned < request.num_known for request, _ in step.prefills)
                step.limit = "prefill_chunk" if cut else "kv_blocks"

    def _share_of_longs(self, budget: int, longs: list[Request]) -> int:
        """Tokens of a step that are kept for long prompts, however many short ones there are."""
        if budget < 2:
            return 0
        missing = sum(request.num_known - request.num_planned for request in longs)
        return min(max(1, int(budget * self._config.long_step_share)), missing)

    def _prompt_limit(self, step: Step) -> int:
        """Prompt tokens that keep the step short enough for the streams in it; always enough to get on."""
        if self._max_itl is None or not step.decodes:
            return self._max_step_tokens
        start = max((request.num_planned for request in self.prefilling), default=0)
        most = self._cost.max_prefill_tokens(self._max_itl, step.shape, start, self._max_step_tokens)
        return max(most, _LEAST_PROMPT_TOKENS)

    def _give(self, request: Request, budget: int, step: Step, now: float) -> int:
        """Put up to `budget` tokens of a prompt into the step; returns how many."""
        if budget <= 0 or request.plan_after >= step.number:
            return 0
        self._extend(request, self._kv.advance(request), step)
        if request.plan_after >= step.number:
            return 0
        start, block_size = request.num_planned, self._config.block_size
        count = min(request.num_known - start, self._prefill_chunk, budget)
        if request.is_scoring:
            count = min(count, _SCORED_CHUNK)
        # Whole blocks can be shared at once; but where the step has room for a few blocks only, that would waste much.
        if start + count < request.num_known and (count >= _ALIGNED_BLOCKS * block_size or step.prefills):
            count -= min((start + count) % block_size, count)
        self._extend(request, self._kv.take(request, start + count), step)
        count = min(count, request.capacity - start)
        if count <= 0:
            return 0
        request.num_planned += count
        if request.timeline is not None and not request.timeline.first_scheduled:
            request.timeline.first_scheduled = now
        sample = request.num_planned == request.num_known
        step.prefills.append((request, sample))
        step.columns += (request.row, start, count, int(sample))
        step.prefill_tokens += count
        step.chunk_context += start
        step.prefill_context += count * (start + count / 2)
        self._kv.publish(request)
        if self._charges:
            self.policy.served(request, count)
        if sample:
            self._kv.pin(request, now)
            self.prefilling.remove(request)
            insort(self.decoding, request, key=_key)
        return count

    @staticmethod
    def _extend(request: Request, blocks: list[int], step: Step) -> None:
        """Tell the worker of new blocks, unless it will get the whole table anyway."""
        if blocks and request.admitted_in != step.number:
            first = len(request.block_table) - len(blocks)
            for index, block in enumerate(blocks, first):
                step.grown += (request.row, index, block)

    # --- admission ---

    def _admit(self, step: Step, budget: int, left: int, longs: list[Request], now: float) -> None:
        """Start waiting requests in the policy's order, as long as rows, tokens and blocks last.

        `left` of the step's `budget` is for short prompts; long ones that start are added to `longs`.
        """
        if not len(self.policy):
            return
        oldest = min(request.arrival for request in self.policy) if not self.num_running else now
        places, step.wake_at = self._gate.places(now, len(self.policy), self.num_running, oldest)
        within_itl = self._row_limit() - self.num_running
        rows = min(len(self._free_rows), places, within_itl)
        while rows > 0 and left > 0:
            request = self._next(longs, now)
            if request is None:
                step.limit = "long_prompts"
                return
            if self._is_held_back(request):
                step.limit = "suspect"
                return
            if not self._start(request, step, now):
                step.limit = "kv_blocks"
                return
            rows -= 1
            places -= 1
            within_itl -= 1
            if request.is_long:
                kept = self._share_of_longs(budget, longs)
                longs.append(request)
                left -= self._share_of_longs(budget, longs) - kept
            else:
                left -= self._give(request, left, step, now)
        if not len(self.policy):
            return
        if rows > 0:
            step.limit = "max_step_tokens"
        elif not self._free_rows:
            step.limit = "max_seqs"
        else:
            step.limit = "batch_wait_ms" if places <= 0 else "max_itl_ms"

    def _is_held_back(self, request: Request) -> bool:
        """One suspect at a time, until it has got a token: else all would be lost again with the guilty one."""
        return request.is_suspect and any(other.is_suspect for other in self.prefilling + self.decoding)

    def _row_limit(self) -> int:
        """Running requests, as long as those that decode, that all get a token within the ITL limit; at least one."""
        if self._max_itl is None or not self._cost.ready:
            return self._max_seqs
        return max(1, self._cost.max_decode_rows(self._max_itl, self.decode_context / max(1, len(self.decoding))))

    def _next(self, longs: list[Request], now: float) -> Request | None:
        """The next in order; a long one only while few enough are being computed and hold blocks."""
        request = self.policy.first(now, True)
        if request is None or not request.is_long:
            return request
        if len(longs) < self._config.max_long_prefills:
            others = [other for other in self.prefilling + self.decoding if other.is_long]
            held = sum(len(other.block_table) + other.promised for other in others)
            if not others or held + self._kv.blocks_for(self.positions(request)) <= self._long_blocks:
                return request
        return self.policy.first(now, False)

    def positions(self, request: Request) -> int:
        """Positions for which a request must have blocks in view before it starts."""
        return request.last if self._config.kv_shortage == "wait" else len(request.tokens)

    def _start(self, request: Request, step: Step, now: float) -> bool:
        # Each running request may soon need one more block; without that reserve the newcomer would be preempted.
        reserve = 0 if self._config.kv_shortage == "wait" else self.num_running
        while not self._kv.admit(request, positions=self.positions(request), reserve=reserve):
            if self.num_running or self._kv.copies_out or not self._kv.pins.release_first():
                return False
        self.policy.remove(request)
        self._gate.joined()
        request.row = self._free_rows.pop()
        request.state = State.RUNNING
        request.admitted_in, request.started = step.number, now
        request.key = self.policy.running_key(request)
        if request.preemptions:
            self.recomputed_tokens += max(0, request.lost_positions - request.num_planned)
        insort(self.prefilling, request, key=_key)
        step.admitted.append(request)
        return True
