"""The core and a fake worker with a clock in between, driven step by step by the tests."""

import math
from collections import deque
from typing import Any

import msgspec

from config.schema import SchedulerConfig
from ipc.codec import pack_ints, unpack_floats, unpack_ints
from ipc.engine_messages import RowOutput, SamplingSpec, StepPlan, Submit
from ipc.messages import Failed
from scheduler_proc.batching import Batching
from scheduler_proc.core import SchedulerCore
from scheduler_proc.cost_model import CostModel
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
    SendPlan,
    StepDone,
    Stopped,
    Tick,
    WakeAt,
)
from scheduler_proc.invariants import violations
from tests.unit.scheduler_proc.fake_worker import VOCABULARY, FakeWorker, continuation
from tests.unit.scheduler_proc.timelines import Timelines

GREEDY = SamplingSpec()  # its seed becomes the request's id
PEER = b"tok0"


class Engine:
    """Keeps every event's outcome and checks the invariants after each."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_seqs: int = 8,
        max_step_tokens: int = 32,
        prefill_chunk: int | None = None,
        max_model_len: int = 1024,
        num_host_blocks: int = 0,
        batching: Batching = "continuous",
        cost_model: CostModel | None = None,
        hang_timeout: float = math.inf,
        measure: bool = True,
        **settings: Any,
    ) -> None:
        config = SchedulerConfig(
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            prefill_chunk=prefill_chunk or max_step_tokens,
            block_size=block_size,
            **settings,
        )
        self.core = SchedulerCore(
            config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCABULARY,
            num_host_blocks=num_host_blocks,
            batching=batching,
            cost_model=cost_model,
            hang_timeout=hang_timeout,
            measure=measure,
        )
        self.new_worker = lambda: FakeWorker(num_blocks, block_size, max_seqs, num_host_blocks)
        self.worker = self.new_worker()
        self.seconds = lambda plan: 0.01  # how long a step takes
        self.wake_at: float | None = None
        self.given_up: list[GiveUpRanks] = []
        self.plans: deque[StepPlan] = deque()
        self.sent: list[StepPlan] = []
        self.time = 0.0
        self.submitted: dict[int, tuple[list[int], int, frozenset[int], int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.embeddings: dict[int, bytes] = {}
        self.scores: dict[int, list[float]] = {}  # log-probabilities of prompts
        self.failures: dict[int, Failed] = {}
        self.timelines = Timelines(measured=measure)
        self.silenced: set[int] = set()  # aborted or stopped from outside: nothing may come for them any more
        self.handle(EngineReady(0.0))

    def handle(self, event: Event) -> None:
        self.wake_at = None
        for command in self.core.handle(event):
            self._carry_out(command)
        found = violations(self.core)
        assert not found, found
        assert self.core.steps_in_flight <= 2

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, SendPlan):
            self.plans.append(command.plan)
            self.sent.append(command.plan)
            self.timelines.planned(self.time, command.plan)
            return
        if isinstance(command, WakeAt):
            self.wake_at = command.time
            return
        if isinstance(command, GiveUpRanks):
            self.given_up.append(command)
            return
        assert command.peer == PEER
        # The receiver takes the rows first, and the plain ones then.
        for row in command.outputs.rows:
            if isinstance(row, RowOutput) and row.prompt_scores is not None:
                self._check_live(row.request_id)
                scores = self.scores.setdefault(row.request_id, [])
                assert row.prompt_scores.first == len(scores) + 1, "once, in order, and none missing"
                assert row.request_id not in self.outputs, "before any output"
                scores += unpack_floats(row.prompt_scores.chosen)
        plain_tokens = unpack_ints(command.outputs.plain_tokens)
        plain_ids = memoryview(command.outputs.plain_ids).cast("q")
        for request_id, token in zip(plain_ids, plain_tokens, strict=True):
            self._check_live(request_id)
            self.outputs.setdefault(request_id, []).append(token)
            self.timelines.token(self.time, request_id)
        for row in command.outputs.rows:
            self._check_live(row.request_id)
            if isinstance(row, Failed):
                self.failures[row.request_id] = row
                self.ends[row.request_id] = "failed"
                continue
            assert isinstance(row, RowOutput)
            tokens = unpack_ints(row.token_ids)
            if tokens:
                self.timelines.token(self.time, row.request_id)
            self.timelines.check(self.time, row, len(self.submitted[row.request_id][0]))
            if row.prompt_scores is not None:
                continue
            self.outputs.setdefault(row.request_id, []).extend(tokens)
            self.cached[row.request_id] = row.cached_tokens
            if row.embedding:
                self.embeddings[row.request_id] = row.embedding
            if row.finish is not None:
                self.ends[row.request_id] = row.finish

    def _check_live(self, request_id: int) -> None:
        assert request_id not in self.silenced
        assert request_id not in self.ends, "nothing may follow the end of a request"

    def submit(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int,
        stops: tuple[int, ...] = (0,),
        min_tokens: int = 0,
        namespace: str = "",
        sampling: SamplingSpec = GREEDY,
        **fields: Any,
    ) -> None:
        self.time += 0.001
        self.submitted[request_id] = (prompt, max_tokens, frozenset(stops), min_tokens)
        if fields.get("score_prompt"):
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=0)
        sampling = msgspec.structs.replace(sampling, seed=request_id)
        self.timelines.arrived(self.time, request_id)
        submit = Submit(
            request_id, pack_ints(prompt), max_tokens, min_tokens, pack_ints(stops), sampling, namespace, **fields
        )
        self.handle(Arrived(self.time, PEER, submit))

    def step(self) -> bool:
        """The device finishes its oldest step, or an idle engine waits as it asked; False when it has nothing to do."""
        if not self.plans:
            if self.wake_at is None or not self.core.requests:
                return False
            self.time = max(self.time, self.wake_at)
            self.handle(Tick(self.time))
            return True
        plan = self.plans.popleft()
        seconds = self.seconds(plan)
        self.time += seconds
        result = self.worker.execute(plan)
        self.timelines.answered(self.time, plan.step)
        self.handle(StepDone(self.time, msgspec.structs.replace(result, forward_us=int(seconds * 1e6))))
        return True

    def wait(self, seconds: float) -> None:
        """Time passes in which the device answers nothing; the core is woken when it asked for that."""
        end = self.time + seconds
        while self.wake_at is not None and self.wake_at <= end:
            self.time = max(self.time, self.wake_at)
            self.handle(Tick(self.time))
        self.time = end

    def abort(self, request_id: int) -> None:
        if request_id not in self.ends:
            self.silenced.add(request_id)
        self.handle(Aborted(self.time, PEER, (request_id,)))

    def stop(self, request_id: int) -> None:
        if request_id not in self.ends:
            self.silenced.add(request_id)
        self.handle(Stopped(self.time, PEER, request_id))

    def lose_peer(self) -> None:
        self.silenced.update(set(self.submitted) - set(self.ends))
        self.handle(PeerLost(self.time, PEER))

    def lose_engine(self, in_step: bool = False) -> None:
        """The worker dies, with everything it knew; what it had been sent is lost with it."""
        step = self.worker.next_step + len(self.plans)
        self.plans.clear()
        self.worker = self.new_worker()
        self.worker.next_step = step
        self.handle(EngineLost(self.time, in_step))

    def recover(self, after_crash: bool = False) -> None:
        self.handle(EngineReady(self.time, after_crash))

    def fail(self) -> None:
        self.plans.clear()
        self.handle(EngineFailed(self.time, "rank0 is gone"))

    def run_to_idle(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            raise AssertionError(f"still busy after {max_steps} steps")
        self.check_idle()

    def check_idle(self) -> None:
        """At idle: every request ended once with the right tokens, and no block is held by anyone but the cache."""
        assert not self.core.requests
        assert set(self.ends) | self.silenced == set(self.submitted)
        kv = self.core.kv
        assert kv.num_private == 0
        assert kv.num_promised == 0
        assert not kv.pins.nodes() or kv.tree.num_locked_blocks
        assert kv.pins.nodes() or kv.tree.num_locked_blocks == 0
        assert kv.pool.num_free + kv.tree.num_blocks + kv.pool.num_in_transit == kv.pool.total
        assert kv.host.num_free + kv.tree.num_host_blocks + kv.host.num_in_transit == kv.host.total
        for request_id, (prompt, max_tokens, stops, min_tokens) in self.submitted.items():
            expected = continuation(prompt, max_tokens, stops, min_tokens)
            got = self.outputs.get(request_id, [])
            if request_id in self.silenced:
                assert got == expected[: len(got)]
            elif self.ends[request_id] != "failed":
                assert got == expected
                ended_by_stop = expected[-1] in stops and len(expected) > min_tokens
                assert self.ends[request_id] == ("stop" if ended_by_stop else "length")
