"""Orders and reports between the launcher and a child, over real pipes."""

import os
import queue
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ipc.control import Control, Drain, Fail, Idle, Order, Progress, Ready, StartFailed, Status

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
