"""A real server for tests: `python -m launch` in a process of its own, on a free port, with everything it started."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 180
# Starts quickly. One thread: on a machine with other work two of them wait for each other longer than they compute.
SMALL = ("--served-model-name", "smol", "--dtype", "float32", "--kv-memory", "256MiB", "--threads", "1")
_PR_SET_PDEATHSIG = 1  # prctl(2)


def _end_with_parent() -> None:
    """In the new process: SIGTERM when the tests end, even if they are killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Server:
    """Starts on construction and waits for the ready line; use it as a context manager."""

    def __init__(self, model: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "launch", "--model", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self.stderr = ""
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        timer.cancel()
        if not line.startswith("ready "):
            self.process.wait()
            self._reader.join()
            raise AssertionError(f"the server did not start: {line!r}\n{self.stderr}")
        self.url = line.removeprefix("ready ").strip()
        self.launcher = psutil.Process(self.process.pid)
        self.children = self.launcher.children(recursive=True)

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self.stderr += line

    def said(self, pattern: str) -> str:
        """The first group of a pattern in its stderr, which may come a little later than the ready line."""
        deadline = time.monotonic() + 10
        while not (found := re.search(pattern, self.stderr, re.MULTILINE)):
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.01)
        return found[1]

    def roles(self) -> dict[str, psutil.Process]:
        """The processes that live now, as "worker-0" and the like."""
        self.children += [child for child in self.launcher.children(recursive=True) if child not in self.children]
        return {role: child for child in self.children if is_alive(child) and (role := process_role(child))}

    def child(self, role: str) -> psutil.Process:
        """The one process that lives now of a role: frontend, tokenizer, scheduler or worker."""
        found = [child for name, child in self.roles().items() if name.startswith(role)]
        assert len(found) == 1, f"{role}: {found}"
        return found[0]

    def wait(self, seconds: float) -> int:
        """Exit status of the launcher, which must end within so many seconds."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def survivors(self, seconds: float = 5.0) -> list[psutil.Process]:
        """Child processes still alive after so many seconds, of those seen so far."""
        deadline = time.monotonic() + seconds
        while alive := [child for child in self.children if is_alive(child)]:
            if time.monotonic() > deadline:
                return alive
            time.sleep(0.02)
        return []

    def stop(self) -> int:
        """End it as an operator would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(60)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.roles()
        self.stop()
        left = self.survivors()
        for child in left:
            child.kill()
        assert not left, f"left behind: {left}"


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def process_role(process: psutil.Process) -> str:
    """What a child of the launcher is, from its command line; empty for helpers of children."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return ""
    return Path(command[3]).stem if len(command) > 3 and command[2] == "launch.child" else ""
