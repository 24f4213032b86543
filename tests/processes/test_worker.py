"""The worker process on real sockets with the real model, between a scripted launcher and a scripted scheduler."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from config.arch import read_arch
from config.schema import ChildSpec, Config, Endpoints, ModelConfig, SchedulerConfig, WorkerConfig
from ipc.channels import AsyncRouter
from ipc.codec import Decoder, unpack_ints
from ipc.control import Drain, Fail, Order, Progress, Ready, StartFailed, Status
from ipc.engine_messages import FromWorker, RankReport, StepPlan, StepResult, WorkerReady
from ipc.sessions import new_incarnation
from kernels.cpu.build import find_compiler
from launch.listen import free_loopback_port
from tests.unit.gpu_workers.plans import new_row, plan

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds; only reached when something is broken
NUM_BLOCKS = 32
NUM_HOST_BLOCKS = 6


class Rank:
    """One worker as its launcher sees it."""

    def __init__(self, spec: ChildSpec, directory: Path) -> None:
        spec_file = directory / f"rank{spec.index}.json"
        spec_file.write_bytes(msgspec.json.encode(spec))
        order_read, self._order = os.pipe()
        self._status, status_write = os.pipe()
        self.log = directory / f"rank{spec.index}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "launch.child",
                    spec_file,
                    str(order_read),
                    str(status_write),
                    "gpu_workers.main",
                ],
                cwd=ROOT,
                stderr=log,
                pass_fds=(order_read, status_write),
                start_new_session=True,
            )
        os.close(order_read)
        os.close(status_write)

    def order(self, order: Order) -> None:
        os.write(self._order, msgspec.json.encode(order) + b"\n")

    def close(self) -> list[Status]:
        """End it if it still runs; all that it has reported, at the first call."""
        self.process.kill()
        self.process.wait()
        if self._order < 0:
            return []
        os.close(self._order)
        self._order = -1
        with os.fdopen(self._status, "rb") as pipe:
            return [msgspec.json.decode(line, type=Status) for line in pipe]


Talk = Callable[[Callable[[StepPlan], None], Callable[[int], Awaitable[list[StepResult]]], list[Rank]], Awaitable[None]]


def run_ranks(
    model_path: Path, directory: Path, talk: Talk, *, tp: int = 1, cpus: tuple[int, ...] = ()
) -> list[tuple[int, list[Status], str]]:
    """Start `tp` ranks and let `talk(send, results, ranks)` drive them to their end: status, reports, log of each.

    `cpus`: as many threads, bound to them.
    """
    endpoint = f"ipc://{directory}/workers"
    spec = ChildSpec(
        role="worker",
        index=0,
        config=Config(
            model=ModelConfig(dtype="float32", kv_dtype="float32", quantization="none", max_model_len=256),
            scheduler=SchedulerConfig(max_seqs=4, max_step_tokens=64),
            worker=WorkerConfig(device="cpu", tp=tp, threads=len(cpus) or 1, deterministic=True),
        ),
        arch=read_arch(model_path),
        model_path=str(model_path),
        served_names=(),
        endpoints=Endpoints(clients=(), scheduler="", workers=endpoint, stats=""),
        run_dir=str(directory),
        incarnation=new_incarnation(),
        kv_memory_bytes=0,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        cpus=cpus,
        rendezvous_port=free_loopback_port() if tp > 1 else 0,
    )
    ranks = [Rank(msgspec.structs.replace(spec, index=index), directory) for index in range(tp)]

    async def schedule() -> list[int]:
        ready: dict[bytes, WorkerReady] = {}
        found: list[StepResult] = []
        arrived = asyncio.Event()

        def on_message(peer: bytes, message: FromWorker) -> None:
            if isinstance(message, WorkerReady):
                ready[peer] = message
            elif not isinstance(message, RankReport):
                assert peer == b"rank0"
                found.append(message)
            arrived.set()

        async def until(done: Callable[[], bool]) -> None:
            while not done():
                ended = [rank for rank in ranks if rank.process.poll() is not None]
                assert not ended, f"rank ended early: {ended[0].close()}\n{ended[0].log.read_text()}"
                arrived.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), 0.5)

        async def results(count: int) -> list[StepResult]:
            await until(lambda: len(found) >= count)
            return found

        def send(step: StepPlan) -> None:
            for index in range(tp):
                router.send(b"rank%d" % index, step)

        router = AsyncRouter(endpoint, Decoder(FromWorker), new_incarnation(), on_message, lambda peer: None)
        router.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await until(lambda: len(ready) == tp)
                expected = {b"rank%d" % i: WorkerReady(i, NUM_BLOCKS, NUM_HOST_BLOCKS) for i in range(tp)}
                assert ready == expected
                await talk(send, results, ranks)
                return [await asyncio.to_thread(rank.process.wait) for rank in ranks]
        finally:
            router.close()

    statuses = []
    try:
        statuses = asyncio.run(schedule())
    finally:
        reports = [rank.close() for rank in ranks]
    return [
        (status, report, rank.log.read_text()) for status, report, rank in zip(statuses, reports, ranks, strict=True)
    ]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow), 4])  # the model has three KV heads
def test_a_reference_row_and_drain(model_path: Path, shared_dir: Path, tmp_path: Path, tp: int) -> None:
    with (shared_dir / "reference" / "greedy.jsonl").open() as lines:
        row = next(row for row in map(json.loads, lines) if row["kind"] == "chat" and min(row["margins"]) > 0.01)
    prompt, expected = row["prompt_ids"], row["output_ids"][:6]
    assert len(prompt) < 64

    async def talk(send, results, ranks) -> None:
        send(plan(0, [(1, 0, len(prompt), 1)], new=[new_row(1, prompt, range(5, 10))]))
        for step in range(1, len(expected)):
            send(plan(step, [(1, len(prompt) + step - 1, 1, 1)]))
            await results(step)
        found = await results(len(expected))
        assert [token for result in found for token in unpack_ints(result.token_ids)] == expected
        assert all(result.forward_us > 0 for result in found)
        for rank in ranks:
            rank.order(Drain())

    for status, reports, log in run_ranks(model_path, tmp_path, talk, tp=tp):
        assert status == 0, log
        assert isinstance(reports[-1], Ready)
        stages = list(dict.fromkeys(report.stage for report in reports[:-1] if isinstance(report, Progress)))
        stages = [stage for stage in stages if not stage.startswith("compiling")]
        assert stages[-4:] == ["importing torch", "loading weights", "allocating KV", "warming up"]


def test_a_swapped_out_request_goes_on_where_it_was(model_path: Path, shared_dir: Path, tmp_path: Path) -> None:
    """Swapped out by a plan that does nothing else, its blocks overwritten, swapped in elsewhere, on every rank."""
    with (shared_dir / "reference" / "greedy.jsonl").open() as lines:
        row = next(row for row in map(json.loads, lines) if row["kind"] == "chat" and min(row["margins"]) > 0.01)
    prompt, expected = row["prompt_ids"], row["output_ids"][:6]
    so_far, computed = prompt + expected[:3], len(prompt) + 2
    num_blocks = -(-computed // 16)
    assert num_blocks <= 5
    blocks, elsewhere, host = range(5, 5 + num_blocks), range(20, 20 + num_blocks), range(1, 1 + num_blocks)

    async def talk(send, results, ranks) -> None:
        send(plan(0, [(1, 0, len(prompt), 1)], new=[new_row(1, prompt, [*blocks, 10])]))
        send(plan(1, [(1, len(prompt), 1, 1)]))
        send(plan(2, [(1, len(prompt) + 1, 1, 1)]))
        send(plan(3, freed=[1], outs=zip(blocks, host, strict=True)))
        other = new_row(0, [7] * (16 * num_blocks), blocks)
        send(plan(4, [(0, 0, 16 * num_blocks, 1)], new=[other], ins=zip(host, elsewhere, strict=True)))
        again = new_row(1, so_far, [*elsewhere, 11], num_prompt=len(prompt))
        send(plan(5, [(1, computed, 1, 1)], new=[again]))
        send(plan(6, [(1, computed + 1, 1, 1)]))
        send(plan(7, [(1, computed + 2, 1, 1)]))
        found = await results(8)
        assert [result.step for result in found] == list(range(8))
        assert found[3] == StepResult(step=3, token_ids=b"")
        mine = [*found[:3], *found[5:]]
        assert [token for result in mine for token in unpack_ints(result.token_ids)] == expected
        for rank in ranks:
            rank.order(Drain())

    for status, _, log in run_ranks(model_path, tmp_path, talk, tp=3):
        assert status == 0, log


def test_an_invalid_plan_and_a_fail_order_end_it(model_path: Path, tmp_path: Path) -> None:
    async def send_nonsense(send, results, ranks) -> None:
        send(plan(0, [(1, 0, 5, 1)]))

    ((status, reports, log),) = run_ranks(model_path, tmp_path, send_nonsense)
    assert status == 1
    assert not any(isinstance(report, StartFailed) for report in reports)
    assert "the scheduler's plan of step 0 is invalid: scheduled: row 1 is not in use; this rank ends" in log
    assert "Traceback" not in log

    async def fail(send, results, ranks) -> None:
        ranks[0].order(Fail("the scheduler is lost"))

    ((status, _, _),) = run_ranks(model_path, tmp_path, fail)
    assert status == 0


def cpus_by_thread(pid: int) -> dict[int, set[int]]:
    return {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU only")
def test_compute_threads_are_bound_to_cpus_of_their_own(model_path: Path, tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0), reverse=True)[:2]

    async def talk(send, results, ranks) -> None:
        send(plan(0, [(1, 0, 9, 1)], new=[new_row(1, range(9), range(5, 10))]))
        await results(1)
        pid = ranks[0].process.pid
        bound = cpus_by_thread(pid)
        assert bound.pop(pid) == {first}
        # Threads of libraries keep what is the rank's.
        assert [cpus for cpus in bound.values() if len(cpus) == 1] == [{second}]
        ranks[0].order(Drain())

    ((status, _, log),) = run_ranks(model_path, tmp_path, talk, cpus=(first, second))
    assert status == 0, log


def test_threads_that_the_system_does_not_bind_are_told(model_path: Path, tmp_path: Path) -> None:
    async def talk(send, results, ranks) -> None:
        raise AssertionError("it has started")

    with pytest.raises(AssertionError, match=r"--pin-threads: no thread can be bound to CPU 100000: Invalid argument"):
        run_ranks(model_path, tmp_path, talk, cpus=(100_000,))
