"""The scheduler process: sockets and the clock around the core.

Events are taken in one at a time, in order of arrival, and the commands of one are carried out before the next.
"""

import asyncio
import logging
import time
from collections import deque

import uvloop

from config.schema import ChildSpec
from ipc.channels import AsyncRouter, StatsPublisher
from ipc.codec import Decoder
from ipc.control import Control, Drain, Order, StartError, end_on_error
from ipc.messages import (
    AbortRequests,
    FromWorker,
    SchedulerReady,
    StepOutputs,
    StepResult,
    StopAt,
    Submit,
    TokenizerHello,
    ToScheduler,
    WorkerReady,
)
from scheduler_proc.core import SchedulerCore
from scheduler_proc.events import Aborted, Arrived, EngineLost, Event, PeerLost, SendPlan, StepDone, Stopped

log = logging.getLogger(__name__)

_STATS_SECONDS = 0.25
_FLUSH_SECONDS = 0.2  # for the last messages to leave before the process does


class Scheduler:
    """The shell: knows who is connected, and nothing about requests."""

    def __init__(self, spec: ChildSpec, control: Control) -> None:
        max_model_len = spec.config.model.max_model_len
        assert max_model_len is not None  # resolved by the launcher
        self._spec = spec
        self._control = control
        self.core = SchedulerCore(
            spec.config.scheduler,
            num_blocks=spec.num_blocks,
            max_model_len=max_model_len,
            vocab_size=spec.arch.vocab_size,
        )
        to_scheduler: Decoder[ToScheduler] = Decoder(ToScheduler)
        from_worker: Decoder[FromWorker] = Decoder(FromWorker)
        self._tokenizers = AsyncRouter(
            spec.endpoints.scheduler, to_scheduler, spec.incarnation, self._from_tokenizer, self._tokenizer_lost
        )
        self._workers = AsyncRouter(
            spec.endpoints.workers, from_worker, spec.incarnation, self._from_worker, self._worker_lost
        )
        self._publisher = StatsPublisher(spec.endpoints.stats)
        self._greeted: set[bytes] = set()
        self._ranks = [b"rank%d" % rank for rank in range(spec.config.worker.tp)]
        self._ready_ranks: set[bytes] = set()
        self._events: deque[Event] = deque()
        self._handling = False
        self._ended = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to end."""
        loop = asyncio.get_running_loop()
        self._control.listen(lambda order: loop.call_soon_threadsafe(self._obey, order))
        self._tokenizers.start()
        self._workers.start()
        self._control.stage("waiting for the ranks")
        while not self._ended.is_set():
            self._publisher.send(self.core.stats(time.monotonic(), time.time()))
            try:
                async with asyncio.timeout(_STATS_SECONDS):
                    await self._ended.wait()
            except TimeoutError:
                continue
        await asyncio.sleep(_FLUSH_SECONDS)
        return 0

    def _obey(self, order: Order) -> None:
        if not isinstance(order, Drain):
            self._handle(EngineLost(time.monotonic(), order.reason))
        self._ended.set()

    def _handle(self, event: Event) -> None:
        self._events.append(event)
        if self._handling:
            return  # a send found its peer gone: that loss is an event of its own, after the commands under way
        self._handling = True
        try:
            while self._events:
                for command in self.core.handle(self._events.popleft()):
                    if isinstance(command, SendPlan):
                        for rank in self._ranks:
                            self._workers.send(rank, command.plan)
                    else:
                        self._tokenizers.send(command.peer, StepOutputs(command.rows))
        finally:
            self._handling = False

    # --- tokenizers ---

    def _from_tokenizer(self, peer: bytes, message: ToScheduler) -> None:
        now = time.monotonic()
        match message:
            case Submit():
                self._handle(Arrived(now, peer, message))
            case AbortRequests(request_ids):
                self._handle(Aborted(now, peer, request_ids))
            case StopAt(request_id, num_tokens):
                self._handle(Stopped(now, peer, request_id, num_tokens))
            case TokenizerHello():
                self._greeted.add(peer)
                if self._all_ready:
                    self._welcome(peer)

    def _tokenizer_lost(self, peer: bytes) -> None:
        self._greeted.discard(peer)
        self._handle(PeerLost(time.monotonic(), peer))

    @property
    def _all_ready(self) -> bool:
        return len(self._ready_ranks) == len(self._ranks)

    def _welcome(self, peer: bytes) -> None:
        self._tokenizers.send(peer, SchedulerReady(self._spec.num_blocks, self._spec.config.scheduler.block_size))

    # --- ranks ---

    def _from_worker(self, peer: bytes, message: FromWorker) -> None:
        if isinstance(message, StepResult):
            if peer != self._ranks[0]:
                raise StartError(f"{peer!r} sent a step result; only rank 0 may")
            self._handle(StepDone(time.monotonic(), message))
            return
        assert isinstance(message, WorkerReady)
        if peer not in self._ranks or message.num_blocks != self._spec.num_blocks:
            raise StartError(f"{peer!r} came up with {message.num_blocks} KV blocks, planned: {self._spec.num_blocks}")
        self._ready_ranks.add(peer)
        if self._all_ready:
            for tokenizer in self._greeted:
                self._welcome(tokenizer)
            self._control.ready()

    def _worker_lost(self, peer: bytes) -> None:
        self._ready_ranks.discard(peer)
        log.error("%s is gone", peer.decode(errors="replace"))
        self._handle(EngineLost(time.monotonic(), f"{peer.decode(errors='replace')} of the model is gone"))


def main(spec: ChildSpec, control: Control) -> int:
    """Entry point of the process; `launch.child` calls it."""

    async def run() -> int:
        asyncio.get_running_loop().set_exception_handler(end_on_error)
        return await Scheduler(spec, control).run()

    return uvloop.run(run())
