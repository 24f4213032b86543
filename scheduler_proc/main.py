"""The scheduler process: sockets and the clock around the core.

Events are taken in one at a time, in order of arrival, and the commands of one are carried out before the next. Ranks
may be lost and come back: the core keeps the requests meanwhile, and the tokenizers notice nothing.
"""

import asyncio
import gc
import logging
import os
import secrets
import time
from collections import deque

import msgspec
import uvloop

from config.memory_plan import weight_bytes
from config.schema import ChildSpec
from ipc.channels import AsyncRouter
from ipc.codec import Decoder
from ipc.control import Control, Drain, Order, StartError, Unresponsive, end_on_error
from ipc.engine_messages import (
    AbortRequests,
    FromWorker,
    RankReport,
    SchedulerReady,
    StepFailed,
    StopRequest,
    Submit,
    TokenizerHello,
    TokenizerReport,
    ToScheduler,
    WorkerReady,
)
from ipc.messages import ClientReport
from ipc.process_usage import UsageMeter, watch_loop
from ipc.sessions import LinkError
from ipc.stats_channel import StatsPublisher
from ipc.stats_messages import ProcessUsage, TokenizerWork
from ipc.tracing import Tracer
from scheduler_proc.core import SchedulerCore
from scheduler_proc.diagnosis.changes import Engine
from scheduler_proc.diagnosis.diagnoses import Diagnoses
from scheduler_proc.diagnosis.launch_check import LaunchCheck
from scheduler_proc.event_log import Header, Recorder, create
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
from scheduler_proc.inspector import Inspector
from scheduler_proc.ranks import Ranks
from scheduler_proc.step_tracer import StepTracer
from scheduler_proc.trace_recorder import TraceRecorder

log = logging.getLogger(__name__)

_STATS_SECONDS = 0.25
_GC_THRESHOLDS = 10_000, 50, 100  # new objects, then collections of each younger generation
_FLUSH_SECONDS = 0.2  # for the last messages to leave before the process does


class Scheduler:
    """The shell: knows who is connected, and nothing about requests."""

    def __init__(self, spec: ChildSpec, control: Control) -> None:
        max_model_len = spec.config.model.max_model_len
        assert max_model_len is not None  # resolved by the launcher
        self._spec = spec
        self._control = control
        self._trace = _start_trace(spec)
        self.core = SchedulerCore(
            spec.config.scheduler,
            num_blocks=spec.num_blocks,
            num_host_blocks=spec.num_host_blocks,
            max_model_len=max_model_len,
            vocab_size=spec.arch.vocab_size,
            hang_timeout=spec.config.supervisor.hang_timeout,
            measure=spec.config.supervisor.measure,
            on_end=None if self._trace is None else self._trace.ended,
        )
        self._recorder = self._start_recording(spec, max_model_len)
        to_scheduler: Decoder[ToScheduler] = Decoder(ToScheduler)
        from_worker: Decoder[FromWorker] = Decoder(FromWorker)
        self._tokenizers = AsyncRouter(
            spec.endpoints.scheduler, to_scheduler, spec.incarnation, self._from_tokenizer, self._tokenizer_lost
        )
        self._workers = AsyncRouter(
            spec.endpoints.workers, from_worker, spec.incarnation, self._from_worker, self._worker_lost, strict=True
        )
        self._publisher = StatsPublisher(spec.endpoints.stats)
        self._tracer = Tracer("scheduler-0", spec.endpoints.traces.get("scheduler-0", ""))
        handle = self.core.handle if self._recorder is None else self._recorder.handle
        self._core_handle = StepTracer(self.core, handle, self._tracer).handle
        self._inspector = Inspector(self.core, secrets.token_bytes(32))
        measures = spec.config.supervisor.measure
        self._diagnoses = Diagnoses(self.core, _engine_of(spec), self._publisher) if measures else None
        self._greeted: set[bytes] = set()
        self._meter = UsageMeter("scheduler")
        self._usage: dict[bytes, ProcessUsage] = {}  # of the other processes, as they told last
        self._tokenizer_work: dict[bytes, TokenizerWork] = {}
        self._clients: dict[bytes, tuple[ClientReport, ...]] = {}  # that report to this tokenizer process
        self._ranks = Ranks(spec.config.worker.tp)
        self._serving = False  # the ranks have been ready once
        self._step_failed = False  # as a rank has said before it ended
        self._events: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to end."""
        loop = asyncio.get_running_loop()
        self._control.listen(lambda order: loop.call_soon_threadsafe(self._obey, order), loop)
        self._tokenizers.start()
        self._workers.start()
        self._tracer.start()
        # A full collection over a large radix tree takes tens of milliseconds and finds nothing: it makes no cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        self._control.stage("waiting for the ranks")
        self._tick()
        measuring = []
        if self._diagnoses is not None:
            work = (watch_loop(self._meter.add_lag), self._diagnoses.run())
            measuring = [loop.create_task(part) for part in work]
        while not self._ended.is_set():
            self._publish()
            self._publish_details()
            if self._recorder is not None:
                self._recorder.flush()
            try:
                async with asyncio.timeout(_STATS_SECONDS):
                    await self._ended.wait()
            except TimeoutError:
                continue
        for task in measuring:
            task.cancel()
        await asyncio.sleep(_FLUSH_SECONDS)
        if self._recorder is not None:
            self._recorder.flush()
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)
        return 0

    def _start_recording(self, spec: ChildSpec, max_model_len: int) -> Recorder | None:
        """Of the core's events, when that is wanted. StartError when the log cannot be created."""
        config = spec.config.scheduler
        if not config.event_log:
            return None
        try:
            file = create(config.event_log)
        except OSError as error:
            raise StartError(f"--event-log {config.event_log}: {error.strerror}") from None
        header = Header(
            config=config,
            num_blocks=spec.num_blocks,
            num_host_blocks=spec.num_host_blocks,
            max_model_len=max_model_len,
        )
        return Recorder(self.core.handle, file, header, spec.arch.vocab_size)

    def _publish(self) -> None:
        stats = self.core.stats(time.monotonic(), time.time())
        processes = (self._meter.usage(), *self._usage.values())
        work = tuple(self._tokenizer_work.values())
        self._publisher.send(msgspec.structs.replace(stats, processes=processes, tokenizers=work))
        if self._diagnoses is not None:
            clients = tuple(report for reports in self._clients.values() for report in reports)
            self._diagnoses.processes.take(time.monotonic(), processes, work, clients)

    def _publish_details(self) -> None:
        now = time.monotonic()
        self._inspector.mark(now)
        if self._publisher.watched:
            self._inspector.advance()
            self._publisher.send_details(self._inspector.details(now, time.time()))

    def _obey(self, order: Order) -> None:
        if not isinstance(order, Drain):
            self._handle(EngineFailed(time.monotonic(), order.reason))
        self._ended.set()

    def _handle(self, event: Event) -> None:
        """The only way into the core."""
        self._events.append(event)
        if self._handling:
            return  # a send found its peer gone: that loss is an event of its own, after the commands under way
        self._handling = True
        try:
            while self._events:
                self._set_timer(None)
                handled = self._events.popleft()
                for command in self._core_handle(handled):
                    self._carry_out(command)
                if self._trace is not None and isinstance(handled, PeerLost):
                    self._trace.peer_lost(handled.peer)
        finally:
            self._handling = False

    def _carry_out(self, command: Command) -> None:
        match command:
            case SendPlan(plan):
                for rank in self._ranks.names:
                    self._workers.send(rank, plan)
            case SendOutputs(peer, outputs):
                self._tokenizers.send(peer, outputs)
            case WakeAt(at):
                self._set_timer(at)
            case GiveUpRanks(step, seconds) if self._ranks.ready:
                problem = f"no result of step {step} within {seconds:g} s"
                self._control.report(Unresponsive(self._ranks.incarnation, problem))
                self._step_failed = True
                self._worker_lost(self._ranks.names[0])

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if at is not None:
            delay = max(0.0, at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._handle(Tick(time.monotonic()))

    # --- tokenizers ---

    def _from_tokenizer(self, peer: bytes, message: ToScheduler) -> None:
        now = time.monotonic()
        match message:
            case Submit():
                self._handle(Arrived(now, peer, message))
            case AbortRequests(request_ids):
                self._handle(Aborted(now, peer, request_ids))
            case StopRequest(request_id):
                self._handle(Stopped(now, peer, request_id))
            case TokenizerHello():
                self._greeted.add(peer)
                if self._serving:
                    self._welcome(peer)
            case TokenizerReport(usage, work, clients):
                self._usage[peer], self._tokenizer_work[peer], self._clients[peer] = usage, work, clients

    def _tokenizer_lost(self, peer: bytes) -> None:
        self._greeted.discard(peer)
        self._handle(PeerLost(time.monotonic(), peer))

    def _welcome(self, peer: bytes) -> None:
        self._tokenizers.send(peer, SchedulerReady(self._spec.num_blocks, self._spec.config.scheduler.block_size))

    # --- ranks ---

    def _from_worker(self, peer: bytes, message: FromWorker) -> None:
        if isinstance(message, WorkerReady):
            self._rank_ready(peer, message)
        elif isinstance(message, StepFailed):
            # Not of a loss that is known already: the others of a killed rank fail too, waiting for it.
            self._step_failed = self._ranks.ready
        elif isinstance(message, RankReport):
            self._usage[peer] = message.usage
        elif peer != self._ranks.names[0]:
            raise LinkError(f"{peer!r} sent a step result; only rank 0 may")
        elif self._ranks.ready:  # else it is of a step that the core has given up with the lost ranks
            self._handle(StepDone(time.monotonic(), message))

    def _rank_ready(self, rank: bytes, message: WorkerReady) -> None:
        spec = self._spec
        blocks, planned = (message.num_blocks, message.num_host_blocks), (spec.num_blocks, spec.num_host_blocks)
        if rank not in self._ranks.names or blocks != planned:
            raise StartError(f"{rank!r} came up with {blocks} KV blocks (device, host), planned: {planned}")
        if not self._ranks.reported(rank, self._workers.incarnation_of(rank)):
            return
        self._step_failed = False
        self._handle(EngineReady(time.monotonic(), message.after_crash))
        self._publish()
        if self._serving:
            log.info("all ranks are back")
            return
        self._serving = True
        for tokenizer in self._greeted:
            self._welcome(tokenizer)
        self._control.ready()

    def _worker_lost(self, peer: bytes) -> None:
        if self._ranks.lost(peer):
            log.warning("%s is gone; requests wait until all ranks are back", peer.decode(errors="replace"))
            self._handle(EngineLost(time.monotonic(), self._step_failed))
            self._step_failed = False
            self._publish()


def _engine_of(spec: ChildSpec) -> Engine:
    model = spec.config.model
    as_floats, as_in_file = (
        weight_bytes(
            spec.arch, msgspec.structs.replace(model, quantization=how), native_kernels=True, has_bfloat16=True
        )[0]
        for how in ("none", "auto")
    )
    return Engine(
        config=spec.config,
        num_blocks=spec.num_blocks,
        kv_memory_bytes=spec.kv_memory_bytes,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        dequantized=as_floats / as_in_file,
        launch=LaunchCheck(spec.asked, spec.arch, spec.machine) if spec.asked and spec.machine else None,
    )


def _start_trace(spec: ChildSpec) -> TraceRecorder | None:
    """Of the requests, when that is wanted. StartError when its file cannot be created."""
    path = spec.config.supervisor.record
    if not path:
        return None
    try:
        return TraceRecorder(path, spec.config.scheduler.block_size)
    except OSError as error:
        raise StartError(f"--record {path}: {error.strerror}") from None


def main(spec: ChildSpec, control: Control) -> int:
    """Entry point of the process; `launch.child` calls it."""

    async def run() -> int:
        asyncio.get_running_loop().set_exception_handler(end_on_error)
        return await Scheduler(spec, control).run()

    return uvloop.run(run())
