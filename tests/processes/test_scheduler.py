"""The scheduler process on real sockets, between scripted ranks and a scripted tokenizer: losses and returns."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from config.schema import (
    ChildSpec,
    Config,
    Endpoints,
    ModelArch,
    ModelConfig,
    SchedulerConfig,
    SupervisorConfig,
    WorkerConfig,
)
from ipc.channels import AsyncDealer
from ipc.codec import Decoder, pack_ints, unpack_int64s, unpack_ints
from ipc.control import Drain, Fail, Order, Status, Unresponsive
from ipc.engine_messages import (
    FromScheduler,
    RankReport,
    SamplingSpec,
    SchedulerReady,
    StepOutputs,
    StepPlan,
    Submit,
    TokenizerHello,
    TokenizerReport,
    ToWorker,
    WorkerReady,
)
from ipc.messages import Failed
from ipc.sessions import LinkError, new_incarnation
from ipc.stats_channel import StatsSubscriber
from ipc.stats_messages import LAG_BOUNDS, Diagnosis, EngineDetails, ProcessUsage, Stats, TokenizerWork
from scheduler_proc.main import Scheduler
from tests.unit.ipc.test_channels import until
from tests.unit.scheduler_proc.fake_worker import VOCABULARY, FakeWorker, continuation

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS = 64, 4, 8
ARCH = ModelArch(
    family="llama",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=VOCABULARY,
    max_position=512,
)
incarnations = itertools.count(new_incarnation())


class Launcher:
    """What a `Control` is for: takes reports, gives orders."""

    def __init__(self) -> None:
        self.is_ready = False
        self.reports: list[Status] = []
        self.order: Callable[[Order], object] = lambda order: None

    def listen(self, on_order: Callable[[Order], object], loop: object = None) -> None:
        self.order = on_order

    def stage(self, name: str, fraction: float | None = None) -> None:
        pass

    def ready(self) -> None:
        self.is_ready = True

    def report(self, status: Status) -> None:
        self.reports.append(status)


class Rank:
    """One rank; it keeps plans until `work` lets it answer, and computes like `FakeWorker`."""

    def __init__(
        self, endpoint: str, index: int, incarnation: int, *, quick: bool = True, after_crash: bool = False
    ) -> None:
        self._after_crash = after_crash
        self.plans: list[StepPlan] = []
        self.alive = True
        self.quick = quick
        self._index = index
        self.incarnation = incarnation
        self._worker = FakeWorker(NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS)
        self.dealer: AsyncDealer[ToWorker] = AsyncDealer(
            endpoint, Decoder(ToWorker), b"rank%d" % index, self._on_plan, self._hello, lambda: None, incarnation
        )
        self.dealer.start()

    def _hello(self) -> None:
        self.dealer.send(WorkerReady(self._index, NUM_BLOCKS, after_crash=self._after_crash))

    def _on_plan(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if self.quick:
            self.work()

    def work(self) -> None:
        """Execute the oldest plan; rank 0 answers."""
        plan = self.plans.pop(0)
        self._worker.next_step = plan.step
        result = self._worker.execute(plan)
        if self._index == 0:
            self.dealer.send(result)

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self.dealer.close()


class Tokenizer:
    """Submits requests and collects their tokens."""

    def __init__(self, endpoint: str) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.welcomes = 0
        self._left = False
        self.dealer: AsyncDealer[FromScheduler] = AsyncDealer(
            endpoint, Decoder(FromScheduler), b"tok0", self._take, self._hello, lambda: None
        )
        self.dealer.start()

    def _hello(self) -> None:
        self.dealer.send(TokenizerHello(0))

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self.dealer.close()

    def submit(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        self.tokens[request_id] = []
        self.dealer.send(Submit(request_id, pack_ints(prompt), max_tokens, 0, b"", SamplingSpec()))

    def _take(self, message: FromScheduler) -> None:
        if isinstance(message, SchedulerReady):
            self.welcomes += 1
            return
        assert isinstance(message, StepOutputs)
        for request_id, token in zip(unpack_int64s(message.plain_ids), unpack_ints(message.plain_tokens), strict=True):
            assert request_id not in self.ended
            self.tokens[request_id].append(token)
        for row in message.rows:
            assert row.request_id not in self.ended
            if isinstance(row, Failed):
                self.ended[row.request_id] = row.message
                continue
            self.tokens[row.request_id] += unpack_ints(row.token_ids)
            if row.finish is not None:
                self.ended[row.request_id] = row.finish


class Setting:
    def __init__(self, directory: Path, tp: int, hang_timeout: float = 60.0, *, measure: bool = True) -> None:
        self.spec = ChildSpec(
            role="scheduler",
            index=0,
            config=Config(
                model=ModelConfig(max_model_len=128),
                scheduler=SchedulerConfig(
                    max_seqs=MAX_SEQS, block_size=BLOCK_SIZE, max_step_tokens=32, prefill_chunk=32
                ),
                worker=WorkerConfig(tp=tp),
                supervisor=SupervisorConfig(hang_timeout=hang_timeout, measure=measure),
            ),
            arch=ARCH,
            model_path="",
            served_names=(),
            endpoints=Endpoints(
                clients=(),
                scheduler=f"ipc://{directory}/scheduler",
                workers=f"ipc://{directory}/workers",
                stats=f"ipc://{directory}/stats",
            ),
            run_dir=str(directory),
            incarnation=next(incarnations),
            kv_memory_bytes=0,
            num_blocks=NUM_BLOCKS,
        )
        self.launcher = Launcher()
        self.errors: list[BaseException | None] = []
        self.stats: list[Stats] = []
        self.diagnoses: list[Diagnosis] = []
        self.ranks: list[Rank] = []
        self.ask_for_diagnosis: Callable[[bool], None] = lambda wanted: None

    def start_ranks(self, *, quick: bool = True, after_crash: bool = False) -> list[Rank]:
        """A new generation."""
        incarnation = next(incarnations)
        tp = self.spec.config.worker.tp
        endpoint = self.spec.endpoints.workers
        ranks = [Rank(endpoint, index, incarnation, quick=quick, after_crash=after_crash) for index in range(tp)]
        self.ranks += ranks
        return ranks


@asynccontextmanager
async def running(
    directory: Path, *, tp: int = 1, hang_timeout: float = 60.0, measure: bool = True
) -> AsyncIterator[tuple[Setting, Tokenizer]]:
    """A scheduler whose ranks have not come yet. It must end by the drain order, unless it has failed before."""
    setting = Setting(directory, tp, hang_timeout, measure=measure)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: setting.errors.append(context.get("exception")))
    scheduler = Scheduler(setting.spec, setting.launcher)  # type: ignore[arg-type]
    served = asyncio.create_task(scheduler.run())
    subscriber = StatsSubscriber(
        setting.spec.endpoints.stats,
        setting.stats.append,
        lambda: None,
        on_diagnosis=setting.diagnoses.append,
    )
    setting.ask_for_diagnosis = subscriber.ask_for_diagnosis
    subscriber.start()
    await until(lambda: bool(setting.stats))
    tokenizer = Tokenizer(setting.spec.endpoints.scheduler)
    try:
        yield setting, tokenizer
    finally:
        setting.launcher.order(Drain())
        assert await served == 0
        for rank in setting.ranks:
            rank.die()
        tokenizer.leave()
        subscriber.close()
        scheduler._tokenizers.close()
        scheduler._workers.close()
        scheduler._publisher.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))  # type: ignore[arg-type]


def test_requests_go_on_in_the_next_generation_of_ranks(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path) as (setting, tokenizer):
            [first] = setting.start_ranks(quick=False)
            await until(lambda: setting.launcher.is_ready and tokenizer.welcomes == 1)
            prompts = {1: [1, 2, 3, 4, 5], 2: [6, 7, 8]}
            for request_id, prompt in prompts.items():
                tokenizer.submit(request_id, prompt, 20)
            while len(tokenizer.tokens[1]) < 7:
                if first.plans:
                    first.work()
                await asyncio.sleep(0.001)
            assert len(tokenizer.tokens[2]) > 0
            first.die()
            await until(lambda: not setting.stats[-1].engine_ready)
            assert setting.stats[-1].waiting == 2
            prompts[3] = [9, 10]
            tokenizer.submit(3, prompts[3], 20)
            await until(lambda: setting.stats[-1].waiting == 3)
            setting.start_ranks()
            await until(lambda: len(tokenizer.ended) == 3)
            for request_id, prompt in prompts.items():
                assert tokenizer.tokens[request_id] == continuation(prompt, 20, frozenset())
            await until(lambda: setting.stats[-1].engine_ready and setting.stats[-1].recoveries == 1)
            assert tokenizer.welcomes == 1, "the tokenizers notice nothing"
        assert setting.errors == []

    run(body)


def test_it_diagnoses_while_somebody_asks(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path) as (setting, tokenizer):
            setting.start_ranks()
            await until(lambda: setting.launcher.is_ready and tokenizer.welcomes == 1)
            for request_id in range(12):
                tokenizer.submit(request_id, [request_id + 1, 2, 3], 10)
            await until(lambda: len(tokenizer.ended) == 12)
            assert setting.diagnoses == []
            setting.ask_for_diagnosis(True)
            await until(lambda: len(setting.diagnoses) >= 2)
            told = setting.diagnoses[-1]
            assert (told.arrived, told.finished) == (12, 12)
            assert dict(told.measures)["output_tokens_p50"] == 10
            assert {"ttft", "itl", "throughput"} <= {metric.name for metric in told.metrics}
            assert all(metric.causes for metric in told.metrics)
            setting.ask_for_diagnosis(False)
            await asyncio.sleep(0.5)
            count = len(setting.diagnoses)
            await asyncio.sleep(1.5)
            assert len(setting.diagnoses) == count, "nobody asks any more"
        assert setting.errors == []

    run(body)


def test_successors_may_connect_before_the_loss_of_their_predecessors_is_noticed(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path, tp=2) as (setting, tokenizer):
            old = setting.start_ranks(quick=False)
            await until(lambda: setting.launcher.is_ready)
            tokenizer.submit(1, [1, 2, 3], 10)
            await until(lambda: len(old[0].plans) == 2 == len(old[1].plans))
            # The old connections still stand, with two steps in flight.
            setting.start_ranks()
            await until(lambda: 1 in tokenizer.ended)
            assert tokenizer.tokens[1] == continuation([1, 2, 3], 10, frozenset())
            await until(lambda: setting.stats[-1].recoveries == 1)
        assert setting.errors == []

    run(body)


@pytest.mark.parametrize("after_crash", [True, False])
def test_requests_of_ranks_that_crash_again_and_again_run_one_by_one(tmp_path: Path, after_crash: bool) -> None:
    """Of ranks that were killed they do not: then each would only be in danger for longer."""

    async def body() -> None:
        async with running(tmp_path) as (setting, tokenizer):
            [rank] = setting.start_ranks(quick=False)
            await until(lambda: setting.launcher.is_ready)
            rank.die()
            await until(lambda: not setting.stats[-1].engine_ready)
            tokenizer.submit(1, [1, 2, 3], 5)
            tokenizer.submit(2, [4, 5, 6], 5)
            await until(lambda: setting.stats[-1].waiting == 2)
            for losses in (2, 3):
                [rank] = setting.start_ranks(quick=False, after_crash=after_crash)
                await until(lambda rank=rank: sum(len(plan.new_rows) for plan in rank.plans) == 2)
                rank.die()
                await until(lambda losses=losses: setting.stats[-1].recoveries == losses)
            [rank] = setting.start_ranks(quick=False, after_crash=after_crash)
            await until(lambda: len(rank.plans) == 2)
            assert sum(len(plan.new_rows) for plan in rank.plans) == (1 if after_crash else 2)
            while len(tokenizer.ended) < 2:
                if rank.plans:
                    rank.work()
                await asyncio.sleep(0.001)
            for request_id, prompt in ((1, [1, 2, 3]), (2, [4, 5, 6])):
                assert tokenizer.tokens[request_id] == continuation(prompt, 5, frozenset())
        assert setting.errors == []

    run(body)


def test_one_lost_rank_is_enough_and_results_of_the_others_no_longer_count(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path, tp=3) as (setting, tokenizer):
            old = setting.start_ranks(quick=False)
            await until(lambda: setting.launcher.is_ready)
            tokenizer.submit(1, [1, 2, 3], 10)
            await until(lambda: len(old[0].plans) == 2)
            old[2].die()
            await until(lambda: not setting.stats[-1].engine_ready)
            old[0].work()  # late
            await asyncio.sleep(0.05)
            assert tokenizer.tokens[1] == []
            new = setting.start_ranks()
            await until(lambda: 1 in tokenizer.ended)
            assert tokenizer.tokens[1] == continuation([1, 2, 3], 10, frozenset())
            assert all(rank.dealer.connected for rank in new)
        assert setting.errors == []

    run(body)


def test_a_tokenizer_that_comes_during_a_recovery_is_welcome(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path) as (setting, tokenizer):
            [first] = setting.start_ranks()
            await until(lambda: setting.launcher.is_ready)
            first.die()
            await until(lambda: not setting.stats[-1].engine_ready)
            tokenizer.leave()
            again = Tokenizer(setting.spec.endpoints.scheduler)
            await until(lambda: again.welcomes == 1)
            again.submit(1, [5, 6], 4)
            setting.start_ranks()
            await until(lambda: 1 in again.ended)
            assert again.tokens[1] == continuation([5, 6], 4, frozenset())
            again.leave()
        assert setting.errors == []

    run(body)


def test_nobody_is_welcome_before_all_ranks_have_come_once(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path, tp=2) as (setting, tokenizer):
            rank = Rank(setting.spec.endpoints.workers, 0, next(incarnations))
            setting.ranks.append(rank)
            await until(lambda: rank.dealer.connected and tokenizer.dealer.connected)
            await asyncio.sleep(0.1)
            assert not setting.launcher.is_ready
            assert tokenizer.welcomes == 0
            assert not setting.stats[-1].engine_ready
        assert setting.errors == []

    run(body)


def test_a_fail_order_ends_every_request_with_its_reason(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path) as (setting, tokenizer):
            [rank] = setting.start_ranks()
            await until(lambda: setting.launcher.is_ready)
            rank.die()
            await until(lambda: not setting.stats[-1].engine_ready)
            for request_id in (1, 2):
                tokenizer.submit(request_id, [1, 2, 3], 10)
            await until(lambda: setting.stats[-1].waiting == 2)
            setting.launcher.order(Fail("the ranks did not come back"))
            await until(lambda: len(tokenizer.ended) == 2)
            assert set(tokenizer.ended.values()) == {"the ranks did not come back"}

    run(body)


def test_ranks_that_hang_are_reported_and_their_requests_go_on_in_the_next_generation(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path, tp=2, hang_timeout=1.0) as (setting, tokenizer):
            old = setting.start_ranks()
            await until(lambda: setting.launcher.is_ready)
            for request_id in range(4):  # the length of a step gets known
                tokenizer.submit(request_id, [request_id + 1, 2, 3], 10)
                await until(lambda number=request_id: number in tokenizer.ended)
            for rank in old:
                rank.quick = False
            tokenizer.submit(9, [1, 2, 3], 10)
            await until(lambda: not setting.stats[-1].engine_ready)
            await until(lambda: len(setting.launcher.reports) == 1)
            report = setting.launcher.reports[0]
            assert isinstance(report, Unresponsive)
            assert report.incarnation == old[0].incarnation
            old[0].work()  # it was slow and not dead, but its successors are on the way
            setting.start_ranks()
            await until(lambda: 9 in tokenizer.ended)
            assert tokenizer.tokens[9] == continuation([1, 2, 3], 10, frozenset())
            await until(lambda: setting.stats[-1].recoveries == 1)
        assert setting.errors == []

    run(body)


def test_a_rank_that_cannot_be_trusted_is_an_error_of_the_process(tmp_path: Path) -> None:
    """Cut off, it would live on, and nobody would replace it."""

    async def body() -> None:
        async with running(tmp_path) as (setting, _):
            socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.set(zmq.IDENTITY, b"rank0")
            socket.connect(setting.spec.endpoints.workers)
            socket.send_multipart((b"no header", b""))
            await until(lambda: bool(setting.errors))
            assert isinstance(setting.errors[0], LinkError)
            socket.close(0)

    run(body)


def test_what_other_processes_report_is_published_with_its_own_usage(tmp_path: Path) -> None:
    tokenizer_usage = ProcessUsage("tokenizer-0", 1.5, (1, *[0] * len(LAG_BOUNDS)), 0.0001)
    work = TokenizerWork(3, 10, 0.5, 0.25, 6, 0.75, 2, 1.5, 2.5)

    async def body() -> None:
        async with running(tmp_path, tp=2) as (setting, tokenizer):
            ranks = setting.start_ranks()
            await until(lambda: setting.launcher.is_ready and tokenizer.welcomes == 1)
            tokenizer.dealer.send(TokenizerReport(tokenizer_usage, work))
            for index, rank in enumerate(ranks):
                rank.dealer.send(RankReport(ProcessUsage(f"worker-{index}", 10.0 + index)))
            await until(lambda: len(setting.stats[-1].processes) == 4)
            stats = setting.stats[-1]
            own, *others = stats.processes
            assert own.name == "scheduler"
            assert own.cpu_seconds > 0
            assert sorted(others, key=lambda usage: usage.name) == [
                tokenizer_usage,
                ProcessUsage("worker-0", 10.0),
                ProcessUsage("worker-1", 11.0),
            ]
            assert stats.tokenizers == (work,)
            tokenizer.dealer.send(TokenizerReport(tokenizer_usage, msgspec.structs.replace(work, prompts=11)))
            await until(lambda: setting.stats[-1].tokenizers[0].prompts == 11)

    run(body)


def test_details_are_sent_while_somebody_asks_for_them(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path) as (setting, tokenizer):
            setting.start_ranks(quick=False)
            await until(lambda: setting.launcher.is_ready and tokenizer.welcomes == 1)
            details: list[EngineDetails] = []
            tokenizer.submit(1, [1, 2, 3, 4, 5], 20)
            subscriber = StatsSubscriber(setting.spec.endpoints.stats, lambda stats: None, lambda: None, details.append)
            subscriber.start()
            seen = len(setting.stats)
            await until(lambda: len(setting.stats) > seen + 2)
            assert not details, "nobody has asked"
            subscriber.ask_for_details(True)
            await until(lambda: bool(details) and bool(details[-1].requests))
            [request] = details[-1].requests
            assert (request.id, request.prompt_tokens) == ("1", 5)
            subscriber.close()

    run(body)
