"""The core and a fake worker with a clock in between, driven step by step by the tests."""

from collections import deque

from config.schema import SchedulerConfig
from ipc.codec import pack_ints, unpack_ints
from ipc.messages import Failed, RowOutput, SamplingSpec, StepPlan, Submit
from scheduler_proc.core import SchedulerCore
from scheduler_proc.events import Aborted, Arrived, Command, EngineLost, Event, PeerLost, SendPlan, StepDone, Stopped
from scheduler_proc.invariants import violations
from tests.unit.scheduler_proc.fake_worker import VOCABULARY, FakeWorker, continuation

GREEDY = SamplingSpec(0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, b"", b"", 0, b"", -1)
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
        prefix_cache: bool = True,
        max_model_len: int = 1024,
        max_queue_requests: int = 1000,
        max_queue_tokens: int = 1 << 20,
    ) -> None:
        config = SchedulerConfig(
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            prefill_chunk=prefill_chunk or max_step_tokens,
            block_size=block_size,
            prefix_cache=prefix_cache,
            max_queue_requests=max_queue_requests,
            max_queue_tokens=max_queue_tokens,
        )
        self.core = SchedulerCore(config, num_blocks=num_blocks, max_model_len=max_model_len, vocab_size=VOCABULARY)
        self.worker = FakeWorker(num_blocks, block_size, max_seqs)
        self.plans: deque[StepPlan] = deque()
        self.sent: list[StepPlan] = []
        self.time = 0.0
        self.submitted: dict[int, tuple[list[int], int, frozenset[int], int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.failures: dict[int, Failed] = {}
        self.silenced: set[int] = set()  # aborted or stopped from outside: nothing may come for them any more

    def handle(self, event: Event) -> None:
        for command in self.core.handle(event):
            self._carry_out(command)
        found = violations(self.core)
        assert not found, found
        assert self.core.steps_in_flight <= 2

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, SendPlan):
            self.plans.append(command.plan)
            self.sent.append(command.plan)
            return
        assert command.peer == PEER
        for row in command.rows:
            assert row.request_id not in self.silenced
            assert row.request_id not in self.ends, "nothing may follow the end of a request"
            if isinstance(row, Failed):
                self.failures[row.request_id] = row
                self.ends[row.request_id] = "failed"
                continue
            assert isinstance(row, RowOutput)
            self.outputs.setdefault(row.request_id, []).extend(unpack_ints(row.token_ids))
            self.cached[row.request_id] = row.cached_tokens
            if row.finish is not None:
                self.ends[row.request_id] = row.finish

    def submit(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int,
        stops: tuple[int, ...] = (0,),
        min_tokens: int = 0,
        namespace: str = "",
    ) -> None:
        self.time += 0.001
        self.submitted[request_id] = (prompt, max_tokens, frozenset(stops), min_tokens)
        submit = Submit(request_id, pack_ints(prompt), max_tokens, min_tokens, pack_ints(stops), GREEDY, namespace)
        self.handle(Arrived(self.time, PEER, submit))

    def step(self) -> bool:
        """Let the device finish its oldest step; False when it has none."""
        if not self.plans:
            return False
        self.time += 0.01
        self.handle(StepDone(self.time, self.worker.execute(self.plans.popleft())))
        return True

    def abort(self, request_id: int) -> None:
        if request_id not in self.ends:
            self.silenced.add(request_id)
        self.handle(Aborted(self.time, PEER, (request_id,)))

    def stop(self, request_id: int, num_tokens: int) -> None:
        if request_id not in self.ends:
            self.silenced.add(request_id)
        self.handle(Stopped(self.time, PEER, request_id, num_tokens))

    def lose_peer(self) -> None:
        self.silenced.update(set(self.submitted) - set(self.ends))
        self.handle(PeerLost(self.time, PEER))

    def lose_engine(self) -> None:
        self.plans.clear()
        self.handle(EngineLost(self.time, "rank0 is gone"))

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
        assert kv.pool.num_in_transit == 0
        assert kv.tree.num_locked_blocks == 0
        assert kv.pool.num_free + kv.tree.num_blocks == kv.pool.total
        for request_id, (prompt, max_tokens, stops, min_tokens) in self.submitted.items():
            expected = continuation(prompt, max_tokens, stops, min_tokens)
            got = self.outputs.get(request_id, [])
            if request_id in self.silenced:
                assert got == expected[: len(got)]
            elif self.ends[request_id] != "failed":
                assert got == expected
                ended_by_stop = expected[-1] in stops and len(expected) > min_tokens
                assert self.ends[request_id] == ("stop" if ended_by_stop else "length")
