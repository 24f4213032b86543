"""One process that sends its part of a run's requests: `python -m tools.loadgen.worker WORK_FILE`.

Open loop: each request is sent when it is due, whatever became of those before it. Closed loop: each user sends the
next one after its answer. What is measured, the parent computes; here nothing is done that could wait.
"""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from launch import time_slice
from tools.loadgen.answer import Answer, within
from tools.loadgen.clients import Client, make_client
from tools.loadgen.messages import Answered, Broken, Ended, FromWorker, Item, Progress, Ready, Ticks, Work
from tools.loadgen.prompts import Prompts

_TICK = 0.01  # seconds between looks at how late the event loop is
_PROGRESS_SECONDS = 0.5
_PRIORITY = -10  # nice; only who may


class Worker:
    """The requests of one `Work`, from the start to the last answer. What it finds out, it tells the parent."""

    def __init__(self, work: Work, client: Client) -> None:
        self._work = work
        self._client = client
        self._start = 0.0
        self._sent = 0
        self._tokens = 0  # of answers that have ended
        self._answers: set[Answer] = set()  # the others
        self._ticks: Ticks = []  # that have not been told
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, start: float) -> None:
        """Send everything and wait for all answers; those that `cancel` cuts off are told as such."""
        self._start = start
        watchers = [asyncio.create_task(self._watch_loop()), asyncio.create_task(self._show_progress())]
        try:
            await (self._closed_loop() if self._work.closed else self._open_loop())
            await self._all_ended()
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            await self._all_ended()
        for watcher in watchers:
            watcher.cancel()
        tell(Ended(self._ticks, _TICK))

    async def _open_loop(self) -> None:
        for item in self._work.items:
            prepared = self._client.prepare(item)
            await _until(self._start + item.due)
            self._begin(self._request(item, prepared, item.due))
            await asyncio.sleep(0)  # it is sent before the next one is made, also of a burst

    async def _closed_loop(self) -> None:
        users: dict[int, list[Item]] = {}
        for item in self._work.items:
            users.setdefault(item.user, []).append(item)
        for items in users.values():
            self._begin(self._user(items))

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _all_ended(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _user(self, items: Sequence[Item]) -> None:
        ready = 0.0  # seconds from the start
        try:
            for item in items:
                due = ready + item.due
                if due > self._work.end:
                    return
                prepared = self._client.prepare(item)
                await _until(self._start + due)
                if await self._request(item, prepared, due):
                    return
                ready = time.monotonic() - self._start
        except asyncio.CancelledError:
            return  # while it was thinking

    async def _request(self, item: Item, prepared: Any, due: float) -> bool:
        """`due`: seconds from the start. True when it was cancelled."""
        answer = Answer()
        request_id = f"{self._work.run_id}-{item.index}"
        self._sent += 1
        self._answers.add(answer)
        answer.sent = time.monotonic()
        await within(self._work.target.timeout, answer, lambda: self._client.send(prepared, request_id, answer))
        self._answers.remove(answer)
        self._tokens += answer.received
        answer.ended = time.monotonic()
        record = answer.record(item, request_id, self._work.worker, due, self._start)
        tell(Answered(record))
        return record.outcome == "cancelled"

    async def _watch_loop(self) -> None:
        """A timer's lateness is how long whatever comes in has to wait before it is seen."""
        await _until(self._start)
        while True:
            due = time.monotonic() + _TICK
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            self._ticks.append((now - self._start, max(0.0, now - due)))

    async def _show_progress(self) -> None:
        await _until(self._start)
        wall, cpu = time.monotonic(), time.process_time()
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            now, used = time.monotonic(), time.process_time()
            tokens = self._tokens + sum(answer.received for answer in self._answers)
            begin, end = wall - self._start, now - self._start
            tell(Progress(self._sent, tokens, begin, end, (used - cpu) / (now - wall), self._ticks))
            self._ticks = []
            wall, cpu = now, used


async def _until(moment: float) -> None:
    while (wait := moment - time.monotonic()) > 0:  # a timer may be a millisecond early
        await asyncio.sleep(wait)


def tell(message: FromWorker) -> None:
    """A line to the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def serve(work: Work) -> None:
    prompts = Prompts(work.content_seed, work.token_range, work.words)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    try:
        client = make_client(work.target, prompts)
        await client.connect()
    except (ConnectionError, ValueError) as error:  # ValueError: key files that have changed meanwhile
        tell(Broken(str(error)))
        return
    try:
        gc.collect()
        gc.freeze()  # the plan is not looked through again and again while requests are on their way
        tell(Ready())
        order = (await orders.readline()).split()
        if len(order) != 2:
            return  # the parent has changed its mind, or is gone
        running = asyncio.create_task(Worker(work, client).run(float(order[1])))
        stopped = asyncio.create_task(orders.readline())  # "stop", or the end of a parent that is gone
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        await running
        stopped.cancel()
    finally:
        await client.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent says what comes of it
    with suppress(PermissionError):
        # It takes little, and beside a server on the same cores it is to be in time all the same.
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    time_slice.ask_for(time_slice.SECONDS)
    path = Path(sys.argv[1])
    work = msgspec.msgpack.decode(path.read_bytes(), type=Work)
    uvloop.run(serve(work))


if __name__ == "__main__":
    main()
