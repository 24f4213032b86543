"""What the launcher and a child tell each other besides ZeroMQ: orders one way, progress the other.

Both are pipes of JSON lines. The order pipe doubles as the death pipe: its end of file means that the launcher is gone,
and the child ends at once.
"""

import asyncio
import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

log = logging.getLogger(__name__)

_LONGEST_LINE = 400  # characters of an error


class Drain(Struct, tag=True, frozen=True):
    """Take no new requests, finish the running ones, then exit 0."""


class Fail(Struct, tag=True, frozen=True):
    """The engine is lost: end every request with an error that says `reason`, then exit 0."""

    reason: str


class Ping(Struct, tag=True, frozen=True):
    """Say `Alive`, from where the work of this process is done."""


Order = Drain | Fail
ToChild = Order | Ping


class Progress(Struct, tag=True, frozen=True):
    """A stage of start-up, for people to read."""

    stage: str
    fraction: float | None = None


class Ready(Struct, tag=True, frozen=True):
    """This process can do its work."""


class StartFailed(Struct, tag=True, frozen=True):
    """This process cannot start; `message` is a paragraph for a person, not a traceback."""

    message: str


class Idle(Struct, tag=True, frozen=True):
    """After `Drain`: no request is left here."""


class Unresponsive(Struct, tag=True, frozen=True):
    """From the scheduler: the ranks of this incarnation hang, as `problem` shows, and have to be replaced."""

    incarnation: int
    problem: str


class Alive(Struct, tag=True, frozen=True):
    """Answer to `Ping`."""


Status = Progress | Ready | StartFailed | Idle | Unresponsive | Alive


class StartError(Exception):
    """A failure to start whose text is fit for a user; `launch.child` reports it without a traceback."""


def in_a_line(error: BaseException) -> str:
    """Kind and first line of an error, of a group the first one's; for people, without where it happened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}"[:_LONGEST_LINE].removesuffix(": ")


def end_on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of a process's event loop: what a callback could not handle ends the process.

    A process that goes on after that would be up and useless; one that ends is noticed by the launcher at once.
    """
    error = context.get("exception")
    log.error("%s: %r", context.get("message", "unhandled error"), error)
    log.debug("", exc_info=error)
    os._exit(1)


class Control:
    """A child's end of both pipes.

    `watch` comes first, before anything slow is imported: from then on the process ends with its launcher, and orders
    are kept for `listen`.
    """

    def __init__(self, order_fd: int, status_fd: int) -> None:
        self._order_fd = order_fd
        self._status_fd = status_fd
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
        self._watching = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_ready = False

    def report(self, status: Status) -> None:
        """Tell the launcher; a launcher that is gone is noticed by the order pipe, not here."""
        line = msgspec.json.encode(status) + b"\n"
        try:
            with self._lock:
                os.write(self._status_fd, line)
        except OSError:
            pass

    def stage(self, name: str, fraction: float | None = None) -> None:
        self.report(Progress(name, fraction))

    def ready(self) -> None:
        self.is_ready = True
        self.report(Ready())

    def watch(self) -> None:
        """Read the order pipe in a thread of its own; end the process when the launcher is gone."""
        self._watching = True
        threading.Thread(target=self._read, name="launcher-watch", daemon=True).start()

    def listen(self, on_order: Callable[[Order], object], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Call `on_order`, from a thread of its own, for each order, those that came before this call included.

        Pings are answered here: by a callback on `loop`, which a loop that hangs does not run, or by that thread.
        """
        self._loop = loop
        if not self._watching:
            self.watch()
        threading.Thread(target=self._deliver, args=(on_order,), name="orders", daemon=True).start()

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(ToChild)
        with os.fdopen(self._order_fd, "rb") as pipe:
            for line in pipe:
                self._orders.put(decoder.decode(line))
        # Nobody is left to report to, and no cleanup is worth outliving the launcher for.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # with whatever this process has started itself
        os._exit(70)  # EX_SOFTWARE

    def _deliver(self, on_order: Callable[[Order], object]) -> None:
        while True:
            order = self._orders.get()
            if not isinstance(order, Ping):
                on_order(order)
            elif self._loop is None:
                self.report(Alive())
            else:
                with contextlib.suppress(RuntimeError):  # a closed loop: the process is about to end
                    self._loop.call_soon_threadsafe(self.report, Alive())
