"""The scheduler core: `handle(event) -> commands`.

What does not belong here: sockets, clocks, threads and logging (see `main`), which request goes next (`planner`), which
block holds what (`kv_manager`). Same events, same commands: the core can be recorded, replayed and simulated.
"""

from array import array
from collections import deque
from dataclasses import dataclass

from config.schema import SchedulerConfig
from ipc.codec import pack_ints, unpack_ints
from ipc.messages import Failed, FinishReason, NewRow, RawLogprobs, RowOutput, Stats, StepPlan, StepResult, Submit
from scheduler_proc.events import (
    Aborted,
    Arrived,
    Command,
    EngineLost,
    Event,
    PeerLost,
    SendOutputs,
    SendPlan,
    StepDone,
    Stopped,
)
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.planner import Planner, Scheduled, Step
from scheduler_proc.request import Request, State

MAX_STEPS_IN_FLIGHT = 2  # the device runs one while the next already waits for it


class ProtocolError(Exception):
    """A rank's result that does not belong to the oldest step in flight: the engine cannot be trusted any more."""


@dataclass(slots=True, frozen=True)
class _InFlight:
    number: int
    scheduled: list[Scheduled]


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    device_busy_us: int = 0


class SchedulerCore:
    """Requests in, plans and tokens out."""

    def __init__(self, config: SchedulerConfig, *, num_blocks: int, max_model_len: int, vocab_size: int) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self.kv = KVManager(num_blocks, config.block_size, config.prefix_cache)
        self.planner = Planner(config, self.kv)
        self.requests: dict[tuple[bytes, int], Request] = {}
        self.counters = Counters()
        self._in_flight: deque[_InFlight] = deque()
        self._next_step = 0
        self._freed_rows: list[int] = []
        self._queued_tokens = 0
        self._lost: str | None = None

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def handle(self, event: Event) -> list[Command]:
        """Take one event in; the commands are to be carried out in order."""
        commands: list[Command] = []
        match event:
            case StepDone(time, result):
                commands += self._step_done(time, result)
            case Arrived(time, peer, submit):
                refusal = self._arrive(time, peer, submit)
                if refusal is not None:
                    self.counters.refused += 1
                    commands.append(SendOutputs(peer, (refusal,)))
            case Aborted(_, peer, request_ids):
                for request_id in request_ids:
                    self._abort(self.requests.get((peer, request_id)))
            case Stopped(_, peer, request_id, num_tokens):
                self._stop(self.requests.get((peer, request_id)), num_tokens)
            case PeerLost(_, peer):
                for request in [request for request in self.requests.values() if request.peer == peer]:
                    self._abort(request)
            case EngineLost(_, reason):
                return self._fail_all(reason)
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT and self._lost is None:
            plan = self._plan()
            if plan is None:
                break
            commands.append(SendPlan(plan))
        return commands

    # --- requests ---

    def _arrive(self, time: float, peer: bytes, submit: Submit) -> Failed | None:
        """Queue a request, or say why not."""
        tokens: array[int] = array("i")
        tokens.frombytes(submit.token_ids)
        if (refusal := self._check(peer, submit, tokens)) is not None:
            return refusal
        request = Request(peer, submit, tokens, time)
        self.requests[peer, submit.request_id] = request
        self.planner.add(request)
        self._queued_tokens += request.num_prompt
        return None

    def _check(self, peer: bytes, submit: Submit, tokens: "array[int]") -> Failed | None:
        def refuse(message: str, param: str | None, status: int = 400, retry_after: float | None = None) -> Failed:
            kinds = {400: "invalid_request_error", 429: "rate_limit_error", 503: "server_error"}
            codes = {400: None, 429: "queue_full", 503: "engine_unavailable"}
            return Failed(submit.request_id, status, message, kinds[status], param, codes[status], retry_after)

        if self._lost is not None:
            return refuse(self._lost, None, 503, 1.0)
        if (peer, submit.request_id) in self.requests:
            return refuse(f"request_id {submit.request_id} is already in use", "request_id")
        if not tokens:
            return refuse("prompt: it must have at least one token", "prompt")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            return refuse(f"prompt: token ids must be from 0 to {self._vocab_size - 1}", "prompt")
        if submit.max_tokens < 1:
            return refuse(f"max_tokens: {submit.max_tokens} is below 1", "max_tokens")
        total = len(tokens) + submit.max_tokens
        if total > self._max_model_len:
            return refuse(
                f"max_tokens: the prompt's {len(tokens)} tokens plus {submit.max_tokens} exceed the context of "
                f"{self._max_model_len}",
                "max_tokens",
            )
        blocks = self.kv.blocks_for(total)
        if blocks > self.kv.pool.total:
            return refuse(
                f"max_tokens: prompt and output of {total} tokens need {blocks} KV blocks, the whole pool has "
                f"{self.kv.pool.total}",
                "max_tokens",
            )
        waiting = len(self.planner.waiting)
        if waiting >= self._config.max_queue_requests:
            return refuse(f"{waiting} requests are waiting already; try again later", None, 429, 1.0)
        if waiting and self._queued_tokens + len(tokens) > self._config.max_queue_tokens:
            return refuse(f"{self._queued_tokens} prompt tokens are waiting already; try again later", None, 429, 1.0)
        return None

    def _abort(self, request: Request | None) -> None:
        if request is not None:  # else it ended while the abort was on its way
            self._end(request)
            self.counters.aborted += 1

    def _stop(self, request: Request | None, num_tokens: int) -> None:
        if request is not None:
            self.counters.generated_tokens -= max(0, request.num_outputs - num_tokens)
            self._end(request)
            self.counters.finished += 1

    def _end(self, request: Request) -> None:
        """Release everything of a request; a result still on its way for it will be dropped."""
        del self.requests[request.peer, request.request_id]
        if request.state is State.WAITING and request.cached_tokens < 0:
            self._queued_tokens -= request.num_prompt
        row = self.planner.remove(request, self._last_step())
        if row is not None:
            self._freed_rows.append(row)

    def _fail_all(self, reason: str) -> list[Command]:
        self._lost = reason
        self._in_flight.clear()  # nobody will compute these, nor touch their blocks
        self.kv.pool.step_returned(self._next_step)
        failures: dict[bytes, list[Failed]] = {}
        for request in list(self.requests.values()):
            failed = Failed(request.request_id, 503, reason, "server_error", None, "engine_lost", 1.0)
            failures.setdefault(request.peer, []).append(failed)
            self._end(request)
        return [SendOutputs(peer, tuple(rows)) for peer, rows in failures.items()]

    # --- steps ---

    def _last_step(self) -> int | None:
        return self._in_flight[-1].number if self._in_flight else None

    def _plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute."""
        step = self.planner.plan(self._last_step())
        self._freed_rows += step.freed_rows
        if not step.scheduled:
            return None
        for request in step.admitted:
            if request.epoch == 0:
                self._queued_tokens -= request.num_prompt
                self.counters.prompt_tokens += request.num_prompt
                self.counters.cached_tokens += request.cached_tokens
        number = self._next_step
        self._next_step += 1
        self._in_flight.append(_InFlight(number, step.scheduled))
        plan = self._encode(number, step)
        self._freed_rows = []
        return plan

    def _encode(self, number: int, step: Step) -> StepPlan:
        new_rows = tuple(
            NewRow(
                request.row,
                request.tokens.tobytes(),
                request.num_prompt,
                pack_ints(request.block_table),
                request.sampling,
            )
            for request in step.admitted
        )
        new_blocks = array("i")
        for request, first, blocks in step.grown:
            for index, block in enumerate(blocks, first):
                new_blocks.extend((request.row, index, block))
        scheduled = array("i")
        for item in step.scheduled:
            scheduled.extend((item.request.row, item.start, item.count, item.sample))
        return StepPlan(number, new_rows, pack_ints(self._freed_rows), new_blocks.tobytes(), scheduled.tobytes())

    def _step_done(self, time: float, result: StepResult) -> list[Command]:
        """Book a step's result: confirm what was computed, hand out what was sampled, end what has ended."""
        if self._lost is not None:
            return []
        if not self._in_flight or self._in_flight[0].number != result.step:
            due = self._in_flight[0].number if self._in_flight else "none"
            raise ProtocolError(f"result of step {result.step}, due is {due}")
        flight = self._in_flight.popleft()
        token_ids = unpack_ints(result.token_ids)
        sampled = sum(item.sample for item in flight.scheduled)
        if len(token_ids) != sampled or len(result.logprobs) not in (0, sampled):
            raise ProtocolError(f"step {result.step} has {len(token_ids)} tokens for {sampled} sampling rows")
        self.kv.pool.step_returned(flight.number)
        self.counters.device_busy_us += result.prepare_us + result.forward_us + result.sample_us
        outputs: dict[bytes, list[RowOutput | Failed]] = {}
        position = 0
        for item in flight.scheduled:
            self.counters.computed_tokens += item.count
            request = item.request
            live = request.epoch == item.epoch and request.state is State.RUNNING
            if live:
                request.num_confirmed = item.start + item.count
                request.last_progress = time
            if item.sample:
                if live:
                    logprobs = result.logprobs[position] if result.logprobs else None
                    row = self._take_token(request, token_ids[position], logprobs)
                    outputs.setdefault(request.peer, []).append(row)
                position += 1
            if live and item.count > 1 and request.state is State.RUNNING:
                self.kv.publish(request)
        return [SendOutputs(peer, tuple(rows)) for peer, rows in outputs.items()]

    def _take_token(self, request: Request, token: int, logprobs: RawLogprobs | None) -> RowOutput:
        if not 0 <= token < self._vocab_size:
            raise ProtocolError(f"sampled token {token} is outside the vocabulary of {self._vocab_size}")
        request.tokens.append(token)
        request.num_unknown -= 1
        self.counters.generated_tokens += 1
        finish: FinishReason | None = None
        stop_token = None
        if token in request.stop_token_ids and request.num_outputs > request.min_tokens:
            finish, stop_token = "stop", token
        elif request.num_outputs >= request.max_tokens:
            finish = "length"
        if finish is not None:
            self._end(request)
            self.counters.finished += 1
        entries = () if logprobs is None else (logprobs,)
        return RowOutput(
            request.request_id, pack_ints((token,)), finish, stop_token, max(0, request.cached_tokens), entries
        )

    # --- for people ---

    def stats(self, time: float, unix_time: float) -> Stats:
        """Counters and gauges of this moment."""
        stuck = min(self.requests.values(), key=lambda request: request.last_progress, default=None)
        kv, counters = self.kv, self.counters
        return Stats(
            time=unix_time,
            step=self._next_step,
            running=len(self.planner.running),
            waiting=len(self.planner.waiting),
            blocks_total=kv.pool.total,
            blocks_free=kv.pool.num_free,
            blocks_cached=kv.tree.num_blocks,
            blocks_private=kv.num_private,
            blocks_in_transit=kv.pool.num_in_transit,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=self.planner.num_preemptions,
            finished=counters.finished,
            aborted=counters.aborted,
            refused=counters.refused,
            oldest_request_seconds=0.0 if stuck is None else max(0.0, time - stuck.last_progress),
            stuck_request="" if stuck is None else stuck.external_id or str(stuck.request_id),
            device_busy_seconds=counters.device_busy_us / 1e6,
        )
