"""Orders and reports between the launcher and a child, over real pipes."""

import asyncio
import os
import queue
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ipc.control import Alive, Control, Drain, Fail, Idle, Order, Ping, Progress, Ready, StartFailed, Status, in_a_line

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def order_pipe() -> tuple[int, int]:
    return os.pipe()


def send(fd: int, order: Order) -> None:
    os.write(fd, msgspec.json.encode(order) + b"\n")


def test_orders_that_come_before_anyone_listens_are_kept_in_order(order_pipe: tuple[int, int]) -> None:
    # The write end stays open: its end of file would end this very process.
    control = Control(order_pipe[0], -1)
    control.watch()
    received: queue.SimpleQueue[Order] = queue.SimpleQueue()
    send(order_pipe[1], Drain())
    send(order_pipe[1], Fail("worker 0 died"))
    control.listen(received.put)
    send(order_pipe[1], Drain())
    assert [received.get(timeout=30) for _ in range(3)] == [Drain(), Fail("worker 0 died"), Drain()]


def test_reports_arrive_as_lines_that_decode() -> None:
    read, write = os.pipe()
    control = Control(-1, write)
    control.stage("loading weights", 0.25)
    assert not control.is_ready
    control.ready()
    assert control.is_ready
    control.report(Idle())
    control.report(StartFailed("two\nlines"))
    os.close(write)
    decoder = msgspec.json.Decoder(Status)
    with os.fdopen(read, "rb") as pipe:
        reports = [decoder.decode(line) for line in pipe]
    assert reports == [Progress("loading weights", 0.25), Ready(), Idle(), StartFailed("two\nlines")]


def test_a_launcher_that_is_gone_does_not_disturb_a_report() -> None:
    read, write = os.pipe()
    os.close(read)
    Control(-1, write).ready()
    os.close(write)


def test_the_end_of_the_order_pipe_ends_a_process_that_is_busy() -> None:
    read, write = os.pipe()
    program = (
        "import sys, time\nfrom ipc.control import Control\nControl(int(sys.argv[1]), -1).watch()\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.01)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(read)], pass_fds=[read], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        os.close(read)
        os.close(write)
        assert child.wait(30) == 70


def test_a_ping_is_answered_by_a_thread_even_while_the_process_is_busy() -> None:
    order_read, order_write = os.pipe()
    status_read, status_write = os.pipe()
    control = Control(order_read, status_write)
    control.listen(lambda order: None)
    os.write(order_write, msgspec.json.encode(Ping()) + b"\n")
    assert msgspec.json.decode(os.read(status_read, 100), type=Status) == Alive()


def test_a_ping_is_answered_by_the_loop_only_when_that_gets_on() -> None:
    order_read, order_write = os.pipe()
    status_read, status_write = os.pipe()
    os.set_blocking(status_read, False)
    control = Control(order_read, status_write)
    told: queue.SimpleQueue[Order] = queue.SimpleQueue()

    async def main() -> bytes:
        control.listen(told.put, asyncio.get_running_loop())
        for order in (Ping(), Drain()):
            os.write(order_write, msgspec.json.encode(order) + b"\n")
        assert told.get(timeout=10) == Drain()  # the loop hangs meanwhile, and the thread has gone past the ping
        with pytest.raises(BlockingIOError):
            os.read(status_read, 100)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return os.read(status_read, 100)

    assert msgspec.json.decode(asyncio.run(main()), type=Status) == Alive()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (KeyError("x"), "KeyError: 'x'"),
        (MemoryError(), "MemoryError"),
        (
            ExceptionGroup("several", [ExceptionGroup("inner", [OSError("no disk")]), ValueError("x")]),
            "OSError: no disk",
        ),
        (RuntimeError("x" * 10_000), "RuntimeError: " + "x" * 386),
    ],
)
def test_an_error_in_a_line(error: BaseException, line: str) -> None:
    assert in_a_line(error) == line
