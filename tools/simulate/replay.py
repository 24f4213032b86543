"""Event logs of the scheduler: fed into a fresh core to see the same plans, and read as traces."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ipc.engine_messages import StepPlan, Submit
from scheduler_proc.core import ProtocolError, SchedulerCore
from scheduler_proc.event_log import REPLAY_VOCABULARY, Entry, EventLog, PlanDigest, digest_of
from scheduler_proc.events import Aborted, Arrived, Command, Event, PeerLost, StepDone, Stopped
from tools.simulate.costs import CostFit, PlanShape, fit_cost, shape_of
from tools.simulate.observer import Arriving, Observer, Status
from tools.simulate.traces import TraceRequest
from tools.traces import TraceError, from_zero

Progress = Callable[[int], None]  # events so far

_PARTS = ("step", "rows", "tokens", "freed_rows", "new_rows", "new_blocks", "scheduled", "copies")


@dataclass(slots=True)
class Replay:
    """What came of a replay; it ends at the first difference, after which the core's state is another."""

    log: EventLog
    submits: list[tuple[float, Submit]]  # time and request, in order of arrival
    observer: Observer
    events: int = 0
    plans: int = 0  # in the log
    equal: int = 0
    difference: str = ""  # in which way the first plan differs; "" when none does
    # Steps and the seconds that each took of the device's time. The gap before a step counts where its plan was there
    # already: then the device did not wait for work.
    measured: list[tuple[PlanShape, float]] = field(default_factory=list)
    measured_at: list[float] = field(default_factory=list)  # when the scheduler heard of the end of each


def replay(path: Path, progress: Progress | None = None, *, keep_outputs: bool = False) -> Replay:
    """Hand a recorded log's events to a fresh core. EventLogError for a file that is none, OSError."""
    log = EventLog(path)
    submits = [(entry.event.time, entry.event.submit) for entry in log if isinstance(entry.event, Arrived)]
    run = _Replaying(Replay(log, submits, Observer(len(submits), keep_outputs=keep_outputs)))
    for entry in log:
        run.take(entry)
        if run.result.difference:
            break
        if progress is not None and run.result.events % 1024 == 0:
            progress(run.result.events)
    return run.result


class _Replaying:
    """A replay under way."""

    def __init__(self, result: Replay) -> None:
        header = result.log.header
        self.result = result
        self._core = SchedulerCore(
            header.config,
            num_blocks=header.num_blocks,
            max_model_len=header.max_model_len,
            vocab_size=REPLAY_VOCABULARY,
            num_host_blocks=header.num_host_blocks,
        )
        self._next = 0  # number of the next arrival
        self._planned: deque[tuple[int, float, PlanShape]] = deque()  # steps under way, when they were planned
        self._last_done = 0.0

    def take(self, entry: Entry) -> None:
        result, event = self.result, entry.event
        result.events += 1
        arriving = None
        if isinstance(event, Arrived):
            arriving = Arriving(self._next, event.peer, event.submit.request_id, event.time)
            # The seed is what the observer knows a row's request by; the core does not look at it.
            sampling = msgspec.structs.replace(event.submit.sampling, seed=self._next)
            event = Arrived(event.time, event.peer, msgspec.structs.replace(event.submit, sampling=sampling))
            self._next += 1
        try:
            commands = self._core.handle(event)
        except ProtocolError as error:
            result.difference = f"{self._where(event)}: the core refuses it: {error}"
            return
        plans = self._observe(event, commands, arriving)
        result.plans += len(entry.plans)
        for recorded, plan in zip(entry.plans, plans, strict=False):
            if not (difference := _difference(recorded, digest_of(plan), plan)):
                result.equal += 1
            elif not result.difference:
                result.difference = f"{self._where(event)}: step {recorded.step}: {difference}"
        if len(plans) != len(entry.plans) and not result.difference:
            steps = ", ".join(str(plan.step) for plan in (entry.plans or plans))
            result.difference = (
                f"{self._where(event)}: {len(entry.plans)} plans were recorded and {len(plans)} are made now "
                f"(step {steps})"
            )

    def _where(self, event: Event) -> str:
        return f"event {self.result.events} ({type(event).__name__} at {event.time:.6f} s)"

    def _observe(self, event: Event, commands: list[Command], arriving: Arriving | None) -> list[StepPlan]:
        observer = self.result.observer
        match event:
            case StepDone(_, done):
                while self._planned and self._planned[0][0] <= done.step:
                    step, planned, shape = self._planned.popleft()
                    if step == done.step:
                        gap = done.between_us if planned < self._last_done else 0
                        seconds = (gap + done.prepare_us + done.forward_us + done.sample_us) / 1e6
                        self.result.measured.append((shape, seconds))
                        self.result.measured_at.append(event.time)
                self._last_done = event.time
            case Aborted(_, peer, request_ids):
                for request_id in request_ids:
                    if (number := observer.number_of(peer, request_id)) is not None:
                        observer.aborted(number)
            case Stopped(time, peer, request_id):
                if (number := observer.number_of(peer, request_id)) is not None:
                    observer.stopped(number, time)
            case PeerLost(_, peer):
                observer.abort_all(peer)
        plans = observer.see(event.time, commands, arriving)
        self._planned.extend((plan.step, event.time, shape_of(plan)) for plan in plans)
        return plans


def _difference(recorded: PlanDigest, made: PlanDigest, plan: StepPlan) -> str:
    """In which parts two plans differ, and what stands there now; "" when they are equal."""
    parts = [part for part in _PARTS if getattr(recorded, part) != getattr(made, part)]
    if not parts:
        return ""
    return (
        f"{', '.join(parts)} differ; recorded: step {recorded.step}, {recorded.rows} rows, {recorded.tokens} tokens; "
        f"now: step {plan.step}, {made.rows} rows, {made.tokens} tokens"
    )


def cost_from_log(path: Path) -> CostFit:
    """Costs that fit the steps measured in a log; CostError when it has too few of them."""
    return fit_cost(replay(path).measured)


def trace_from_log(path: Path, *, limit: int | None = None, progress: Progress | None = None) -> list[TraceRequest]:
    """A log's requests: synthetic prompts, and the outputs that were generated, or the limit where nothing was."""
    result = replay(path, progress, keep_outputs=True)
    if result.difference:
        raise TraceError(f"{path}: this program schedules otherwise than the recorded one: {result.difference}")
    observer = result.observer
    assert observer.outputs is not None
    requests = []
    for number, (time, submit) in enumerate(result.submits[:limit]):
        outputs = observer.outputs[number]
        done = observer.status[number] in (Status.FINISHED, Status.ABORTED)
        requests.append(
            TraceRequest(
                time,
                submit.token_ids,
                len(submit.token_ids) // 4,
                max(1, len(outputs)) if done else submit.max_tokens,
                outputs.tobytes(),
                submit.namespace,
                submit.tenant,
                submit.priority,
                submit.ttft_target_ms,
                submit.cache_pin_seconds,
            )
        )
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    return from_zero(requests)
