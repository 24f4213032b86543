"""The parent of a run: starts the workers, gives them one moment to begin at, and collects what they tell."""

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from tools.loadgen.lag import WorkerLoad
from tools.loadgen.messages import Answered, Broken, Ended, FromWorker, Progress, Ready, Record, Target, Work
from tools.loadgen.progress import ProgressLine
from tools.loadgen.schedule import Schedule, dealt

_HEAD_START = 0.2  # seconds between the last worker's being ready and the first request
_LINE_LIMIT = 1 << 26  # bytes of a worker's message
_START_SECONDS = 60.0


class RunError(Exception):
    """A run that could not be; the text is one line for the user."""


@dataclass(slots=True)
class Run:
    """What came of it. `started`: the moment from which records count, as Unix time and on the monotonic clock."""

    schedule: Schedule
    records: list[Record]
    workers: list[WorkerLoad]
    started_unix: float
    started_monotonic: float
    interrupted: bool
    unwritten: str = ""  # why records are missing from the file, if some are


@dataclass(slots=True)
class _Worker:
    process: asyncio.subprocess.Process
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    load: WorkerLoad = field(default_factory=lambda: WorkerLoad([], 1.0, []))
    progress: Progress = field(default_factory=lambda: Progress(0, 0, 0.0, 0.0, 0.0, []))
    ended: bool = False
    broken: str = ""

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        with suppress(ConnectionError):
            self.process.stdin.write(text.encode() + b"\n")


class Runner:
    """One run of a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        target: Target,
        *,
        run_id: str,
        processes: int,
        content_seed: int,
        token_range: tuple[int, int],
        words: Sequence[str],
        records_file: BinaryIO | None,
    ) -> None:
        self._schedule = schedule
        hands = [hand for hand in dealt(schedule.items, min(processes, len(schedule.items)), schedule.closed) if hand]
        self._works = [
            Work(
                target=target,
                worker=number,
                run_id=run_id,
                items=hand,
                closed=schedule.closed,
                end=schedule.end,
                content_seed=content_seed,
                token_range=token_range,
                words=tuple(words),
            )
            for number, hand in enumerate(hands)
        ]
        self._file = records_file
        self._records: list[Record] = []
        self._workers: list[_Worker] = []
        self._interrupts = 0
        self._unwritten = ""
        self._line = ProgressLine(len(schedule.items))

    async def run(self) -> Run:
        """Ends when all requests have; SIGINT and SIGTERM end it early, with what has come. Raises `RunError`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            with tempfile.TemporaryDirectory(prefix="tokenmill-loadgen-") as folder:
                return await self._run(Path(folder))
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            for worker in self._workers:
                if worker.process.returncode is None:
                    worker.process.kill()
                    await worker.process.wait()

    async def _run(self, folder: Path) -> Run:
        readers = []
        for work in self._works:
            file = folder / f"{work.worker}.msgpack"
            file.write_bytes(msgspec.msgpack.encode(work))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tools.loadgen.worker", str(file)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT,
                start_new_session=True,  # Ctrl-C is for this process, which then asks them to end
            )
            worker = _Worker(process)
            self._workers.append(worker)
            readers.append(asyncio.create_task(self._read(worker)))
        try:
            async with asyncio.timeout(_START_SECONDS):
                for worker in self._workers:
                    await worker.ready.wait()
        except TimeoutError:
            raise RunError(f"a worker process was not ready after {_START_SECONDS:g} s") from None
        self._check()
        start, unix = time.monotonic() + _HEAD_START, time.time() + _HEAD_START
        for worker in self._workers:
            worker.order("stop" if self._interrupts else f"start {start!r}")
        shower = asyncio.create_task(self._show(start))
        await asyncio.wait(readers)
        shower.cancel()
        self._line.end()
        self._check()
        self._write(b"", flush=True)
        loads = [worker.load for worker in self._workers]
        self._records.sort(key=lambda record: record.index)
        return Run(self._schedule, self._records, loads, unix, start, self._interrupts > 0, self._unwritten)

    def _check(self) -> None:
        """RunError when a worker failed; one that was killed after an interrupt is only silent."""
        for worker in self._workers:
            if worker.broken:
                raise RunError(worker.broken)
            if not worker.ended and worker.process.returncode is not None and not self._interrupts:
                raise RunError(f"a worker process ended with status {worker.process.returncode}")

    async def _read(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        decode = msgspec.json.Decoder(FromWorker).decode
        async for line in worker.process.stdout:
            try:
                self._take(worker, decode(line))
            except msgspec.DecodeError:
                break  # the last line of one that was killed
        await worker.process.wait()
        worker.ready.set()
        if not worker.ended:  # what the others measure is not the load that was asked for
            self._stop_all()

    def _take(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case Ready():
                worker.ready.set()
            case Progress():
                worker.progress = message
                worker.load.cpu.append((message.begin, message.end, message.cpu))
                worker.load.ticks += message.ticks
            case Answered(record):
                record.measured = self._schedule.measures(record.scheduled)
                self._records.append(record)
                self._line.add(record)
                self._write(msgspec.json.encode(record) + b"\n")
            case Ended(ticks, tick):
                worker.load.ticks += ticks
                worker.load.tick, worker.ended = tick, True
            case Broken(reason):
                worker.broken = reason

    def _write(self, line: bytes, *, flush: bool = False) -> None:
        """To the file of the records. The run goes on without it when the disk is full."""
        if self._file is None or self._unwritten:
            return
        try:
            self._file.write(line)
            if flush:
                self._file.flush()
        except OSError as error:
            self._unwritten = error.strerror or str(error)

    def _interrupt(self) -> None:
        """Once: what is on its way is given up and what has come is reported. Twice: at once."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._stop_all()
            return
        for worker in self._workers:
            if worker.process.returncode is None:
                worker.process.kill()

    def _stop_all(self) -> None:
        for worker in self._workers:
            worker.order("stop")

    async def _show(self, start: float) -> None:
        while True:
            await asyncio.sleep(self._line.period)
            progress = [worker.progress for worker in self._workers]
            self._line.show(
                max(0.0, time.monotonic() - start),
                sent=sum(part.sent for part in progress),
                tokens=sum(part.tokens for part in progress),
                cpu=max(part.cpu for part in progress),
            )
            self._write(b"", flush=True)
