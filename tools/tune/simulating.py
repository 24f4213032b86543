"""Simulations in processes of their own: `python -m tools.tune.simulating WORK_FILE` answers lines with lines."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import msgspec
from msgspec import Struct

from tools.loadgen.slo import Slo
from tools.simulate.simulator import SimulationError
from tools.simulate.traces import TraceRequest, read_trace
from tools.traces import scaled_rate
from tools.tune.predicting import Calibration, Prediction, predict
from tools.tune.space import Candidate


class Source(Struct, frozen=True):
    """A trace and what is done to it."""

    path: str
    limit: int | None = None
    length_scale: float = 1.0
    rate_scale: float = 1.0

    def read(self) -> list[TraceRequest]:
        """As `tools.loadgen` makes of it what a server gets: that generates other outputs than the trace's, so a next
        turn does not find them in the cache; and all requests are of one tenant and alike. TraceError, OSError.
        """
        path = Path(self.path)
        trace = read_trace(path, limit=self.limit, length_scale=self.length_scale, known_outputs=False)
        alike = [replace(request, tenant="", priority=0) for request in trace]
        return scaled_rate(alike, self.rate_scale)


class Work(Struct, frozen=True):
    """What all questions to a process have in common."""

    source: Source
    calibration: Calibration
    slo: Slo
    find_rate: bool


class Answer(Struct, frozen=True):
    """None: the scheduler gets stuck with these settings."""

    prediction: Prediction | None


class PoolError(Exception):
    """A process has ended that should not have; the text is one line for the user."""


class Pool:
    """Processes that simulate, as many as are asked for; ended with the block."""

    def __init__(self, work: Work, processes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tokenmill-tune-")
        file = Path(self._folder.name) / "work.json"
        file.write_bytes(msgspec.json.encode(work))
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tools.tune.simulating", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(processes)
        ]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self.processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(processes)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._threads.shutdown(cancel_futures=True)
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
        self._folder.cleanup()

    def predict(self, candidates: Sequence[Candidate]) -> list[Prediction | None]:
        """In the same order; None for settings with which the scheduler gets stuck. Raises PoolError."""
        return list(self._threads.map(self._ask, candidates))

    def _ask(self, candidate: Candidate) -> Prediction | None:
        process = self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(candidate) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        self._idle.put(process)  # also when it is dead: whoever waits for one is to be told as well
        if not line:
            raise PoolError(f"a simulating process ended with status {process.wait()}")
        return msgspec.json.decode(line, type=Answer).prediction


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process
    work = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Work)
    trace = work.source.read()
    for line in sys.stdin.buffer:
        candidate = msgspec.json.decode(line, type=Candidate)
        try:
            answer = Answer(predict(trace, candidate, work.calibration, work.slo, find_rate=work.find_rate))
        except SimulationError:
            answer = Answer(None)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
