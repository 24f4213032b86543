"""Processes that are asked in JSON lines, so that a kernel can't break more than the process that runs it.

A bad address leaves a CUDA context that nothing can be done with, a failed assertion in a compiler ends its process, a
kernel that hangs has to be ended. What was lost is told, and the next request goes to a new process.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

Request = Mapping[str, Any]
Answer = dict[str, Any]

_END = "end"
_LAST_CHARACTERS = 300  # of what a lost process had to say


class LostError(Exception):
    """The process died or took too long; the text says which, and what it said last."""


class LateError(LostError):
    """It took too long."""


class Worker:
    """Runs `python -m MODULE`, which calls `serve`, from the first request on; a context manager that ends it."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", module]
        self._environment = environment
        self._running: _Running | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, request: Request, seconds: float) -> Iterator[Answer]:
        """The answers to `request`, each of which has `seconds` to come. Raises LostError."""
        running = self._running = self._running or _Running(self._command, self._environment)
        finished = False
        try:
            running.send(json.dumps(request))
            while (answer := json.loads(running.receive(seconds))) != _END:
                yield answer
            finished = True
        finally:
            if not finished:
                self.close()

    def end(self) -> None:
        """From another thread: what is being asked for is lost."""
        running = self._running
        if running is not None:
            running.process.kill()

    def close(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running = None


class _Running:
    """One process, whose output a thread takes, so that waiting for it can end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed with the process)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise LostError(self._last_words()) from None

    def receive(self, seconds: float) -> str:
        try:
            line = self._lines.get(timeout=max(seconds, 0))
        except Empty:
            raise LateError(f"took more than {seconds:g} s") from None
        if not line:
            raise LostError(self._last_words())
        return line

    def _last_words(self) -> str:
        status = self.process.wait()
        self._errors.seek(0)
        said = " ".join(self._errors.read()[-_LAST_CHARACTERS:].split())
        ended = f"its process was ended by signal {-status}" if status < 0 else f"its process ended with {status}"
        return f"{ended}: {said}" if said else ended

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@dataclass(frozen=True, slots=True)
class Result:
    """Of one unit of a request: its answer, or how it was lost."""

    request: Request
    unit: Any
    answer: Answer | None
    lost: str = ""


def ask_all(
    workers: Sequence[Worker], requests: Iterable[Request], seconds: float, until: float = math.inf
) -> Iterator[Result]:
    """Results for all `units` of all `requests`, as they come.

    A worker gives one answer for each unit, within `seconds`. What follows a unit that is lost is asked for again. What
    has not begun at `until`, on the clock of `time.monotonic`, is left out.
    """
    waiting: SimpleQueue[Request] = SimpleQueue()
    for request in requests:
        waiting.put(request)
    results: SimpleQueue[Result | None] = SimpleQueue()
    stopped = threading.Event()

    def run(worker: Worker) -> None:
        try:
            while time.monotonic() < until and not stopped.is_set():
                try:
                    request = waiting.get_nowait()
                except Empty:
                    return
                for result in _ask_units(worker, request, seconds, until, stopped):
                    results.put(result)
        finally:
            results.put(None)

    with ThreadPoolExecutor(len(workers)) as pool:
        running = [pool.submit(run, worker) for worker in workers]
        try:
            ended = 0
            while ended < len(workers):
                result = results.get()
                if result is None:
                    ended += 1
                else:
                    yield result
        finally:
            stopped.set()
            if any(not each.done() for each in running):
                for worker in workers:
                    worker.end()
    for each in running:
        each.result()


def _ask_units(
    worker: Worker, request: Request, seconds: float, until: float, stopped: threading.Event
) -> Iterator[Result]:
    units = list(request["units"])
    while units and not stopped.is_set():
        asked = iter(units)
        try:
            for answer in worker.ask({**request, "units": units}, seconds):
                yield Result(request, next(asked), answer)
                if time.monotonic() >= until:
                    return
        except LostError as error:
            for unit in islice(asked, 1):
                yield Result(request, unit, None, str(error))
        units = list(asked)


def serve(answer: Callable[[Request], Iterable[Answer]]) -> None:
    """Answer the requests on stdin until it ends; what is printed meanwhile goes to stderr."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            for item in answer(json.loads(line)):
                print(json.dumps(item), file=out, flush=True)
            print(json.dumps(_END), file=out, flush=True)
