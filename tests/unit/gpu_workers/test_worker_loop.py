"""The blocking loop over ZeroMQ: plans in, results out, and how it ends."""

import asyncio
import logging
import threading

import pytest

from gpu_workers import step_loop
from gpu_workers.comm import LocalComm
from gpu_workers.runner import Runner
from gpu_workers.step_loop import run_plans
from ipc.channels import AsyncRouter, BlockingDealer
from ipc.codec import Decoder, unpack_ints
from ipc.engine_messages import FromWorker, RankReport, StepFailed, StepResult, ToWorker, WorkerReady
from ipc.process_usage import UsageMeter
from ipc.sessions import new_incarnation
from tests.unit.gpu_workers.plans import HashModel, new_row, overlapping_backend, plain_backend, plan


def run_worker(tmp_path, talk, model=None) -> tuple[int, list[FromWorker]]:
    """Run the loop in a thread, with `talk(send, until, stop)` as its scheduler: exit status and what was received.

    `until(n)` waits for n messages.
    """
    endpoint = f"ipc://{tmp_path}/workers"
    model = model or HashModel(101, 16, 4)
    runner = Runner(model, model.kv, 16, 4, 2, 32, LocalComm(), host_kv=None, num_host_blocks=4)
    stop = threading.Event()
    statuses: list[int] = []

    def work() -> None:
        link = BlockingDealer(endpoint, b"rank0", Decoder(ToWorker))
        link.send(WorkerReady(rank=0, num_blocks=16))
        statuses.append(run_plans(link, runner, stop, UsageMeter("worker-0")))
        link.close()

    async def schedule() -> list[FromWorker]:
        received: list[FromWorker] = []
        arrived = asyncio.Event()

        def on_message(peer: bytes, message: FromWorker) -> None:
            assert peer == b"rank0"
            received.append(message)
            arrived.set()

        router = AsyncRouter(endpoint, Decoder(FromWorker), new_incarnation(), on_message, lambda peer: None)
        router.start()
        thread = threading.Thread(target=work)
        thread.start()

        async def until(count: int) -> None:
            while len(received) < count:
                arrived.clear()
                await arrived.wait()

        try:
            async with asyncio.timeout(20):
                await until(1)
                await talk(lambda message: router.send(b"rank0", message), until, stop)
                await asyncio.to_thread(thread.join)
        finally:
            stop.set()
            router.close()
        return received

    received = asyncio.run(schedule())
    return statuses[0], received


@pytest.mark.parametrize("backend", [plain_backend, overlapping_backend])
def test_two_plans_may_be_on_their_way_and_results_come_in_order(tmp_path, backend):
    async def talk(send, until, stop):
        send(plan(0, [(0, 0, 3, 1)], new=[new_row(0, [1, 2, 3], [4, 5])]))
        send(plan(1, [(0, 3, 1, 1)]))
        send(plan(2, [(0, 4, 1, 1)]))
        await until(4)
        stop.set()

    model = HashModel(101, 16, 4)
    model.backend = backend()
    status, received = run_worker(tmp_path, talk, model)
    assert status == 0
    assert received[0] == WorkerReady(rank=0, num_blocks=16)
    results = received[1:]
    assert [result.step for result in results] == [0, 1, 2]
    sequence = [1, 2, 3]
    for _ in range(3):
        sequence.append(int(HashModel(101, 16, 4).logits_of(sequence).argmax()))
    assert [token for result in results for token in unpack_ints(result.token_ids)] == sequence[3:]


def test_it_tells_what_its_process_uses_while_it_waits_and_while_it_works(tmp_path, monkeypatch):
    monkeypatch.setattr(step_loop, "_REPORT_SECONDS", 0.0)

    async def talk(send, until, stop):
        await until(3)
        send(plan(0, [(0, 0, 3, 1)], new=[new_row(0, [1, 2, 3], [4, 5])]))
        await until(8)
        stop.set()

    status, received = run_worker(tmp_path, talk)
    assert status == 0
    reports = [message.usage for message in received if isinstance(message, RankReport)]
    assert {usage.name for usage in reports} == {"worker-0"}
    seconds = [usage.cpu_seconds for usage in reports]
    assert seconds == sorted(seconds)
    assert sum(isinstance(message, StepResult) for message in received) == 1


def test_an_invalid_plan_ends_the_loop_with_one_clear_line(tmp_path, caplog):
    async def talk(send, until, stop):
        send(plan(0, [(0, 0, 3, 1)]))

    with caplog.at_level(logging.INFO, logger="gpu_workers"):
        status, received = run_worker(tmp_path, talk)
    assert status == 1
    assert not any(isinstance(message, StepResult) for message in received)
    assert [record.getMessage() for record in caplog.records if record.name == "gpu_workers.step_loop"] == [
        "the scheduler's plan of step 0 is invalid: scheduled: row 0 is not in use; this rank ends"
    ]


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, TypeError, IndexError, NotImplementedError])
def test_whatever_fails_in_a_step_is_said_and_ends_the_loop(tmp_path, caplog, kind):
    def copy_blocks_out(kv, host_kv, pairs):
        raise kind(f"no copy of {pairs.tolist()}")

    async def talk(send, until, stop):
        send(plan(0, [(0, 0, 3, 1)], new=[new_row(0, [1, 2, 3], [4])]))
        send(plan(1, [(0, 3, 1, 1)], outs=[(7, 2)]))

    model = HashModel(101, 16, 4)
    model.backend.copy_blocks_out = copy_blocks_out
    with caplog.at_level(logging.INFO, logger="gpu_workers"):
        status, received = run_worker(tmp_path, talk, model)
    assert status == 1
    assert [message.step for message in received if isinstance(message, StepResult)] == [0]
    assert [record.getMessage() for record in caplog.records if record.name == "gpu_workers.step_loop"] == [
        f"step 1 failed: {kind.__name__}: no copy of [[7, 2]]; this rank ends"
    ]
    assert received[-1] == StepFailed()


def test_a_result_that_cannot_be_sent_is_a_failed_step(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(Runner, "collect", lambda runner, step: StepResult(step.plan.step, object()))

    async def talk(send, until, stop):
        send(plan(0, [(0, 0, 3, 1)], new=[new_row(0, [1, 2, 3], [4])]))

    with caplog.at_level(logging.INFO, logger="gpu_workers"):
        status, received = run_worker(tmp_path, talk)
    assert status == 1
    assert received[1:] == [StepFailed()]
    [record] = [record for record in caplog.records if record.name == "gpu_workers.step_loop"]
    assert record.getMessage().startswith("step 0 failed: TypeError: ")


def test_what_nobody_expects_is_said_in_one_line_with_the_step(tmp_path, caplog, monkeypatch):
    recv = BlockingDealer.recv

    def fail_after_a_plan(link, timeout=None):
        if taken:
            raise OSError("the socket is on fire\nand so is the house")
        message = recv(link, timeout)
        taken.extend([message] if message else [])
        return message

    taken = []
    monkeypatch.setattr(BlockingDealer, "recv", fail_after_a_plan)

    async def talk(send, until, stop):
        send(plan(0, [(0, 0, 3, 1)], new=[new_row(0, [1, 2, 3], [4])]))

    with caplog.at_level(logging.INFO, logger="gpu_workers"):
        status, _ = run_worker(tmp_path, talk)
    assert status == 1
    assert [record.getMessage() for record in caplog.records if record.name == "gpu_workers.step_loop"] == [
        "unexpected error after step 0: OSError: the socket is on fire; this rank ends"
    ]


def test_an_idle_rank_ends_when_told_to(tmp_path):
    async def talk(send, until, stop):
        stop.set()

    assert run_worker(tmp_path, talk)[0] == 0
