"""The scheduler core: `handle(event) -> commands`.

What does not belong here: sockets, clocks, threads and logging (see `main`), which request goes next (`planner`), which
block holds what (`kv_manager`), whether a request may come in (`checks`). Same events, same commands: the core can be
recorded, replayed and simulated.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from config.schema import SchedulerConfig
from ipc.codec import pack_int64s, pack_ints, unpack_ints
from ipc.engine_messages import NewRow, RawLogprobs, RowOutput, StepOutputs, StepPlan, StepResult, Submit
from ipc.messages import ChoiceTimings, Failed, FinishReason
from ipc.stats_messages import Stats
from scheduler_proc.admission import Outages, TtftPredictor
from scheduler_proc.batching import BatchGate, Batching
from scheduler_proc.checks import Checks
from scheduler_proc.cost_model import CostModel
from scheduler_proc.counters import Counters
from scheduler_proc.diagnosis.window import State, Totals, Window
from scheduler_proc.events import (
    Aborted,
    Arrived,
    Command,
    EngineFailed,
    EngineLost,
    EngineReady,
    Event,
    GiveUpRanks,
    PeerLost,
    SendOutputs,
    SendPlan,
    StepDone,
    Stopped,
    Tick,
    WakeAt,
)
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.planner import Planner, Step
from scheduler_proc.request import End, Request
from scheduler_proc.watchdog import Watchdog

MAX_LOSSES = 3  # of ranks that a request survives without getting a token in between
MAX_STEPS_IN_FLIGHT = 2  # the device runs one while the next already waits for it


class ProtocolError(Exception):
    """A rank's result that does not belong to the oldest step in flight: the engine cannot be trusted any more."""


@dataclass(slots=True)
class _Outbox:
    """What one event has for one tokenizer."""

    rows: list[RowOutput | Failed] = field(default_factory=list)
    plain_ids: list[int] = field(default_factory=list)
    plain_tokens: list[int] = field(default_factory=list)


class SchedulerCore:
    """Requests in, plans and tokens out. It plans nothing before `EngineReady`."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        num_host_blocks: int = 0,
        batching: Batching = "continuous",
        cost_model: CostModel | None = None,
        hang_timeout: float = math.inf,
        measure: bool = True,
        on_end: Callable[[Request, End], None] | None = None,
    ) -> None:
        """`hang_timeout`: see `Watchdog`. `measure`: keep requests' timelines and a window for diagnoses. `on_end` is
        told of every request, once nothing of it changes any more.
        """
        assert config.max_seqs is not None
        assert config.max_step_tokens is not None
        self._vocab_size = vocab_size
        self._on_end = on_end
        self.kv = KVManager(config, num_blocks, num_host_blocks)
        self.cost_model = cost_model or CostModel()
        self.gate = BatchGate(batching, config.max_seqs, config.batch_wait_ms / 1e3)
        self.planner = Planner(config, self.kv, self.cost_model, self.gate)
        max_itl = None if config.max_itl_ms is None else config.max_itl_ms / 1e3
        self.predictor = TtftPredictor(self.cost_model, config.max_step_tokens, max_itl)
        self._outages = Outages()
        self.checks = Checks(config, self.kv, self.planner, self.predictor, self._outages, max_model_len, vocab_size)
        self.watchdog = Watchdog(self.cost_model, hang_timeout)
        self.requests: dict[tuple[bytes, int], Request] = {}
        self.counters = Counters()
        self.window = Window(config.block_size) if measure else None
        self.engine_ready = False
        self._in_flight: deque[Step] = deque()
        self._next_step = 0
        self._next_order = 0
        self._freed_rows: list[int] = []
        self.wake_at: float | None = None  # when waiting for a batch to fill ends, if that is what it does
        self._lost: list[Request] = []  # those that ran when the ranks were lost, until they are back
        self._failed: str | None = None

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def in_flight(self) -> Iterable[Step]:
        """Those steps, the oldest first; for people to look at."""
        return self._in_flight

    @property
    def _is_idle(self) -> bool:
        return self.engine_ready and not self._in_flight

    def handle(self, event: Event) -> list[Command]:
        """Take one event in; the commands are to be carried out in order."""
        outboxes: dict[bytes, _Outbox] = {}
        self.counters.pass_time(event.time, idle=self._is_idle, has_requests=bool(self.requests))
        match event:
            case StepDone(time, result, ended):
                self._step_done(time, result, ended, outboxes)
            case Arrived(time, peer, submit):
                self._arrive(time, peer, submit, outboxes)
            case Aborted(time, peer, request_ids):
                for request_id in request_ids:
                    self._abort(self.requests.get((peer, request_id)), time)
            case Stopped(time, peer, request_id):
                self._stop(self.requests.get((peer, request_id)), time)
            case PeerLost(time, peer):
                for request in [request for request in self.requests.values() if request.peer == peer]:
                    self._abort(request, time)
            case EngineReady(time, after_crash):
                self.engine_ready = self._failed is None
                self._outages.end(time)
                for request in self._lost:
                    request.lost_in_step |= after_crash
                self._lost = []
            case EngineLost(time, in_step):
                self._outages.begin(time)
                self._lose_engine(in_step, outboxes)
            case EngineFailed(_, reason):
                self._fail_all(reason, outboxes)
            case Tick(time):
                if not self.engine_ready:  # nor has it been, since nothing else asks for a tick then
                    self._outages.begin(time)
        commands: list[Command] = [
            SendOutputs(peer, StepOutputs(tuple(box.rows), pack_int64s(box.plain_ids), pack_ints(box.plain_tokens)))
            for peer, box in outboxes.items()
        ]
        self.kv.pins.expire(event.time)
        self.wake_at = None
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT and self.engine_ready:
            plan = self._plan(event.time)
            if plan is None:
                break
            commands.append(SendPlan(plan))
        oldest = self._in_flight[0] if self._in_flight else None
        if (seconds := self.watchdog.look(oldest, event.time)) is not None and oldest is not None:
            commands.append(GiveUpRanks(oldest.number, seconds))
        batch_at = math.inf if self.wake_at is None else self.wake_at
        wake_at = min(batch_at, self.watchdog.deadline, self.kv.pins.next_expiry)
        if math.isfinite(wake_at):
            commands.append(WakeAt(wake_at))
        return commands

    # --- requests ---

    def _arrive(self, time: float, peer: bytes, submit: Submit, outboxes: dict[bytes, _Outbox]) -> None:
        """Queue a request, or say why not."""
        tokens: array[int] = array("i")
        tokens.frombytes(submit.token_ids)
        request = Request(peer, submit, tokens, time, self._next_order, measured=self.window is not None)
        if self._failed is not None:
            refusal: Failed | None = _unavailable(submit.request_id, self._failed)
        elif (peer, submit.request_id) in self.requests:
            refusal = self.checks.duplicate(submit)
        else:
            refusal = self.checks.refusal(request, submit)
        if refusal is not None:
            self.counters.refused += 1
            if self._on_end is not None:
                self._on_end(request, "refused")
            outboxes.setdefault(peer, _Outbox()).rows.append(refusal)
            return
        self._next_order += 1
        self.requests[peer, submit.request_id] = request
        self.planner.add(request)
        if self.window is not None:
            self.window.arrive(request)
        self.checks.queued_tokens += request.num_prompt

    def _abort(self, request: Request | None, time: float) -> None:
        if request is not None:  # else it ended while the abort was on its way
            if self.window is not None:
                self.window.end(request, time, "aborted")
            self._end(request, "abort")
            self.counters.aborted += 1

    def _stop(self, request: Request | None, time: float) -> None:
        if request is not None:
            if request.row >= 0:
                self.predictor.observe_finish(time - request.started, request.num_outputs)
            if self.window is not None:
                self.window.end(request, time, "stop")
            self._end(request, "stop")
            self.counters.finished += 1

    def _end(self, request: Request, end: End) -> None:
        """Release everything of a request; a result still on its way for it will be dropped."""
        del self.requests[request.peer, request.request_id]
        if request.cached_tokens < 0:
            self.checks.queued_tokens -= request.num_prompt
        row = self.planner.remove(request)
        if row is not None:
            self._freed_rows.append(row)
        if self._on_end is not None:
            self._on_end(request, end)

    def _lose_engine(self, in_step: bool, outboxes: dict[bytes, _Outbox]) -> None:
        """Nobody will answer the steps in flight; running requests wait to be computed again.

        But not for ever: a request that kills the ranks each time it runs would never let the others get on.
        """
        self.engine_ready = False
        self._in_flight.clear()
        self._freed_rows.clear()
        running = self._lost = self.planner.reset(self._next_step)
        self.counters.recoveries += 1
        for request in self.requests.values():
            request.uncached = len(request.tokens)
        for request in running:
            request.losses = 1 if len(request.tokens) > request.tokens_at_loss else request.losses + 1
            request.tokens_at_loss = len(request.tokens)
            request.lost_in_step = in_step
            if request.losses >= MAX_LOSSES:
                reason = f"the model's ranks died {MAX_LOSSES} times while they computed this request"
                failed = Failed(request.request_id, 500, reason, "server_error", None, "engine_died")
                outboxes.setdefault(request.peer, _Outbox()).rows.append(failed)
                self._end(request, "error")

    def _fail_all(self, reason: str, outboxes: dict[bytes, _Outbox]) -> None:
        self._failed = reason
        self.engine_ready = False
        self._in_flight.clear()
        for request in list(self.requests.values()):
            outboxes.setdefault(request.peer, _Outbox()).rows.append(_unavailable(request.request_id, reason))
            self._end(request, "error")

    # --- steps ---

    def _plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        step = self.planner.plan(self._next_step, now)
        self.wake_at = step.wake_at
        self._freed_rows += step.freed_rows
        if not step.columns and not step.admitted and not self.kv.copies_out and not self.kv.copies_in:
            return None
        for request in step.admitted:
            if request.preemptions == 0:
                self.checks.queued_tokens -= request.num_prompt
                self.counters.prompt_tokens += request.num_prompt
        self._next_step += 1
        self._in_flight.append(step)
        self.counters.count_plan(step.limit)
        plan = self._encode(step)
        self._freed_rows = []
        self.kv.end_plan()
        return plan

    def _encode(self, step: Step) -> StepPlan:
        new_rows = tuple(
            NewRow(
                request.row,
                request.tokens.tobytes(),
                request.num_prompt,
                pack_ints(request.block_table),
                request.sampling,
                request.num_scored,
                request.pooling,
            )
            for request in step.admitted
        )
        return StepPlan(
            step.number,
            new_rows,
            pack_ints(self._freed_rows),
            pack_ints(step.grown),
            pack_ints(step.columns),
            pack_ints([block for pair in self.kv.copies_out for block in pair]),
            pack_ints([block for pair in self.kv.copies_in for block in pair]),
        )

    def _step_done(
        self, time: float, result: StepResult, ended: tuple[int, ...] | None, outboxes: dict[bytes, _Outbox]
    ) -> None:
        """Book a step's result: hand out what was sampled, end what has ended.

        The loop is what every token of every request goes through, so it is kept free of calls and objects: a token
        that is nothing but the next one is two numbers in two columns.
        """
        if not self.engine_ready:
            return
        if not self._in_flight or self._in_flight[0].number != result.step:
            due = self._in_flight[0].number if self._in_flight else "none"
            raise ProtocolError(f"result of step {result.step}, due is {due}")
        step = self._in_flight[0]
        token_ids = unpack_ints(result.token_ids)
        rows = step.decodes + [request for request, sample in step.prefills if sample]
        lengths = (len(result.logprobs), len(result.embeddings))
        if len(token_ids) != len(rows) or not {0, len(rows)}.issuperset(lengths):
            raise ProtocolError(f"step {result.step} has {len(token_ids)} tokens for {len(rows)} sampling rows")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ProtocolError(f"step {result.step} sampled a token outside the vocabulary of {self._vocab_size}")
        self._in_flight.popleft()
        busy = result.prepare_us + result.forward_us + result.sample_us
        if rows or step.prefills:  # else it only copied blocks
            self.cost_model.observe(step.shape, busy / 1e6)
        self.counters.count_step(result, len(step.decodes), step.prefill_tokens)
        completed = frozenset(result.completed)
        failed = {failure.index: failure.message for failure in result.failed}
        if step.prefills:
            self._take_chunks(time, step, outboxes)
        if result.prompt_scores:
            self._take_scores(step, result, outboxes)
        number, index, taken = step.number, -1, 0
        peer, box = b"", _Outbox()
        for request, token in zip(rows, token_ids, strict=True):
            index += 1
            if request.row < 0 or number < request.first_valid_step:
                continue  # it has ended or lost its blocks since
            if index in failed:
                self._fail(request, failed[index], outboxes)
                continue
            taken += 1
            tokens = request.tokens
            tokens.append(token)
            request.last_progress = time
            if request.peer != peer:
                peer, box = request.peer, outboxes.setdefault(request.peer, _Outbox())
            if (
                len(tokens) > request.last
                or (token in request.stop_token_ids if ended is None else index in ended)
                or request.loop_detector is not None
                or result.logprobs
                or index in completed
            ):
                logprobs = result.logprobs[index] if result.logprobs else None
                whole = index in completed
                embedding = result.embeddings[index] if result.embeddings else b""
                box.rows.append(self._take_special(request, token, logprobs, embedding, time, ended, index, whole))
            else:
                box.plain_ids.append(request.request_id)
                box.plain_tokens.append(token)
        self.counters.generated_tokens += taken
        if self.window is not None:
            self.window.step_done(step, time, busy / 1e6, self._state(time))

    def _state(self, time: float) -> State:
        kv = self.kv
        used = kv.pool.total - kv.pool.num_free - kv.pool.num_in_transit - kv.tree.num_evictable
        return State(self.planner.num_running, len(self.planner.policy), used / kv.pool.total, self.totals(time))

    def totals(self, time: float) -> Totals:
        """What the diagnosis' window counts, up to this moment."""
        counters = self.counters
        empty, starved = counters.idle_until(time, idle=self._is_idle, has_requests=bool(self.requests))
        return Totals(
            counters.generated_tokens,
            self.planner.num_preemptions,
            self.planner.recomputed_tokens,
            self.kv.evicted_blocks,
            counters.refused,
            counters.aborted,
            empty,
            starved,
            self._next_order,
            counters.finished,
        )

    def _take_chunks(self, time: float, step: Step, outboxes: dict[bytes, _Outbox]) -> None:
        """Book the prompt tokens that a step has computed, before the tokens that it has sampled."""
        counts = step.columns[4 * len(step.decodes) + 2 :: 4]
        for (request, sample), count in zip(step.prefills, counts, strict=True):
            request.last_progress = time
            counts_for_it = request.row >= 0 and step.number >= request.first_valid_step
            if request.timeline is None:
                continue
            request.timeline.add_chunk(step.planned, time, count, sampled=sample and counts_for_it)
            if sample and counts_for_it and request.tells_timings:
                timings = self._timings(request, 0.0, request.num_outputs + 1)
                row = RowOutput(request.request_id, b"", cached_tokens=max(0, request.cached_tokens), timings=timings)
                outboxes.setdefault(request.peer, _Outbox()).rows.append(row)

    @staticmethod
    def _timings(request: Request, last_token: float, outputs: int) -> ChoiceTimings | None:
        if request.timeline is None:
            return None
        return request.timeline.tell(
            queued=request.arrival, last_token=last_token, outputs=outputs, preemptions=request.preemptions
        )

    def _take_scores(self, step: Step, result: StepResult, outboxes: dict[bytes, _Outbox]) -> None:
        """Hand on log-probabilities of prompts; a request gets each of its prompt's once, in order."""
        for scores in result.prompt_scores:
            at = scores.index - len(step.decodes)
            if not 0 <= at < len(step.prefills):
                raise ProtocolError(f"step {result.step} has prompt log-probabilities of row {scores.index}")
            request, _ = step.prefills[at]
            if request.row < 0 or step.number < request.first_valid_step:
                continue  # it has ended or lost its blocks since: it will be computed again
            count = len(scores.chosen) // 4
            if scores.first != request.num_scored + 1 or request.num_scored + count >= request.num_prompt:
                raise ProtocolError(
                    f"step {result.step} has {count} prompt log-probabilities from token {scores.first}, where "
                    f"{request.num_scored} of {request.num_prompt - 1} are known"
                )
            request.num_scored += count
            row = RowOutput(request.request_id, b"", prompt_scores=scores)
            outboxes.setdefault(request.peer, _Outbox()).rows.append(row)

    def _take_special(
        self,
        request: Request,
        token: int,
        logprobs: RawLogprobs | None,
        embedding: bytes,
        time: float,
        ended: tuple[int, ...] | None,
        index: int,
        whole: bool,
    ) -> RowOutput:
        """The output of a token that may be the last one, or has more to say than its id.

        `whole`: it completes what the request's grammar describes.
        """
        finish: FinishReason | None = None
        timings: ChoiceTimings | None = None
        stop_token = None
        loop = request.loop_detector is not None and request.loop_detector.take(token)
        may_stop = request.num_outputs > request.min_tokens
        if ended is not None:
            if index in ended:
                finish = "stop"
        elif token in request.stop_token_ids and may_stop:
            finish, stop_token = "stop", token
        elif whole or (loop and may_stop):
            finish = "stop"
        loop = finish is not None and stop_token is None and ended is None and not whole
        if finish is None and len(request.tokens) > request.last:
            finish = "length"
        if finish is not None:
            self.counters.loop_stops += loop
            self.counters.finished += 1
            self.predictor.observe_finish(time - request.started, request.num_outputs)
            timings = self._timings(request, time, request.num_outputs)
            if self.window is not None:
                self.window.end(request, time, finish)
            self._end(request, finish)
        entries = () if logprobs is None else (logprobs,)
        cached = max(0, request.cached_tokens)
        return RowOutput(
            request.request_id,
            pack_ints((token,)),
            finish,
            stop_token,
            cached,
            entries,
            loop,
            embedding=embedding,
            timings=timings,
        )

    def _fail(self, request: Request, message: str, outboxes: dict[bytes, _Outbox]) -> None:
        """End a request that its own parameters have led to where no token is possible."""
        failed = Failed(request.request_id, 400, message, "invalid_request_error", "grammar", "grammar_failed")
        outboxes.setdefault(request.peer, _Outbox()).rows.append(failed)
        self._end(request, "error")

    # --- for people ---

    def stats(self, time: float, unix_time: float) -> Stats:
        """Counters and gauges of this moment."""
        stuck = min(self.requests.values(), key=lambda request: request.last_progress, default=None)
        kv, planner, counters = self.kv, self.planner, self.counters
        empty, starved = counters.idle_until(time, idle=self._is_idle, has_requests=bool(self.requests))
        return Stats(
            time=unix_time,
            step=self._next_step,
            running=planner.num_running,
            waiting=len(planner.policy),
            blocks_total=kv.pool.total,
            blocks_free=kv.pool.num_free,
            blocks_cached=kv.tree.num_blocks,
            blocks_private=kv.num_private,
            blocks_in_transit=kv.pool.num_in_transit,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=kv.reused_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=planner.num_preemptions,
            finished=counters.finished,
            aborted=counters.aborted,
            refused=counters.refused,
            oldest_request_seconds=0.0 if stuck is None else max(0.0, time - stuck.last_progress),
            stuck_request="" if stuck is None else stuck.external_id or str(stuck.request_id),
            device_busy_seconds=counters.device_busy_us / 1e6,
            engine_ready=self.engine_ready,
            recoveries=counters.recoveries,
            waiting_tokens=self.checks.queued_tokens,
            refused_deadline=self.checks.refused_deadline,
            recomputed_tokens=planner.recomputed_tokens,
            evicted_blocks=kv.evicted_blocks,
            swapped_out_blocks=kv.swapped_out_blocks,
            swapped_in_blocks=kv.swapped_in_blocks,
            host_blocks_total=kv.host.total,
            host_blocks_used=kv.host.total - kv.host.num_free - kv.host.num_in_transit,
            pinned_blocks=kv.pins.num_blocks,
            loop_stops=counters.loop_stops,
            blocks_unused=kv.tree.num_evictable,
            prefill_tokens=counters.prefill_tokens,
            step_tokens=tuple(counters.step_tokens),
            limits=tuple(counters.limits.items()),
            prepare_seconds=counters.prepare_us / 1e6,
            forward_seconds=counters.forward_us / 1e6,
            sample_seconds=counters.sample_us / 1e6,
            score_seconds=counters.score_us / 1e6,
            between_seconds=counters.between_us / 1e6,
            empty_seconds=empty,
            starved_seconds=starved,
        )


def _unavailable(request_id: int, reason: str) -> Failed:
    return Failed(request_id, 503, reason, "server_error", None, "engine_unavailable", 1.0)
