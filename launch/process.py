"""One child process as the launcher sees it: its two pipes, what it has reported, and how it ended."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from config.schema import ChildSpec
from config.sources import API_KEYS_VARIABLE
from ipc.control import Alive, Idle, Progress, Ready, StartFailed, Status, ToChild, Unresponsive

# A segmentation fault and its kind; a failed assertion in a library, or an exception that nobody caught there.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

_REPOSITORY = Path(__file__).resolve().parent.parent


def child_environment() -> dict[str, str]:
    """This process's variables, for one that imports our packages from wherever it runs."""
    paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Process:
    """A spawned role. `on_change(process)` is called on the loop after every report and once after its end."""

    def __init__(self, spec: ChildSpec, on_change: Callable[["Process"], None]) -> None:
        self.role = spec.role
        self.index = spec.index
        self.incarnation = spec.incarnation
        self.after_crash = spec.after_crash
        self.name = f"{spec.role} {spec.index}"
        self.stage = "starting"
        self.fraction: float | None = None
        self.ready = False
        self.idle = False
        self.start_failure: str | None = None
        self.unresponsive: Unresponsive | None = None  # the latest that it has said of others
        self.hang: str | None = None  # why it had to be killed
        self.pinged: float | None = None  # when, on the monotonic clock, until it has answered
        self.told_to_end = False
        self.exit_status: int | None = None  # negative: the number of the signal that killed it
        self._spec = spec
        self._on_change = on_change
        self._decoder = msgspec.json.Decoder(Status)
        self._process: asyncio.subprocess.Process | None = None
        self._waiter: asyncio.Task[None] | None = None
        self._order_fd = self._status_fd = -1
        self._partial = b""

    @property
    def alive(self) -> bool:
        return self.exit_status is None

    @property
    def crashed(self) -> bool:
        """Whether it has broken off its own work, without a word: nobody sends such a signal."""
        return self.ready and self.exit_status is not None and -self.exit_status in _CRASHES

    @property
    def pid(self) -> int | None:
        """None before it was spawned."""
        return None if self._process is None else self._process.pid

    async def spawn(self, module: str, spec_file: Path) -> None:
        """Start it: `module` has the role's `main`, `spec_file` what it needs to know."""
        order_read, self._order_fd = os.pipe()
        self._status_fd, status_write = os.pipe()
        handed_down = [order_read, status_write]
        if self._spec.listen_fd >= 0:
            handed_down.append(self._spec.listen_fd)
        environment = child_environment()
        if self.role != "frontend":
            environment.pop(API_KEYS_VARIABLE, None)  # nobody else has a use for them
        arguments = ["-m", "launch.child", str(spec_file), str(order_read), str(status_write), module]
        try:
            # A session of its own keeps the terminal's Ctrl-C away: the launcher alone decides how all of them end.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # stderr: stdout belongs to the launcher's one line
                pass_fds=handed_down,
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(order_read)
            os.close(status_write)
        os.set_blocking(self._status_fd, False)
        os.set_blocking(self._order_fd, False)
        asyncio.get_running_loop().add_reader(self._status_fd, self._read_status)
        self._waiter = asyncio.create_task(self._wait(self._process))

    def order(self, order: ToChild) -> None:
        """Tell it; a process that is gone or does not read is found by other means."""
        with contextlib.suppress(OSError):
            os.write(self._order_fd, msgspec.json.encode(order) + b"\n")

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process and whatever it has started itself."""
        if self._process is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def ending(self) -> str:
        """How it ended, in words."""
        if self.start_failure is not None:
            return f"{self.name} could not start: {self.start_failure}"
        if self.hang is not None:
            return f"{self.name} was killed because it hangs: {self.hang}"
        status = self.exit_status
        if status is not None and status < 0:
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        else:
            how = f"ended by itself with exit status {status}"
        return f"{self.name} {how}" if self.ready else f"{self.name} {how} while at '{self.stage}'"

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        self._read_status()
        self._close()
        # What it started itself must not outlive it either.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self.exit_status = status
        self._on_change(self)

    def _close(self) -> None:
        if self._status_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._status_fd)
            os.close(self._status_fd)
            self._status_fd = -1
        os.close(self._order_fd)
        self._order_fd = -1  # its number may soon be another file's

    def _read_status(self) -> None:
        while self._status_fd >= 0:
            try:
                data = os.read(self._status_fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._status_fd)
                return
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._note(self._decoder.decode(line))

    def _note(self, status: Status) -> None:
        match status:
            case Progress():
                self.stage, self.fraction = status.stage, status.fraction
            case Ready():
                self.stage, self.fraction, self.ready = "ready", None, True
            case StartFailed():
                self.start_failure = status.message
                # Its end is what counts, so that the death of another rank, which made this one fail, is seen first.
                self.send_signal(signal.SIGKILL)
            case Idle():
                self.idle = True
            case Unresponsive():
                self.unresponsive = status
            case Alive():
                self.pinged = None
                return  # no news for anybody
        self._on_change(self)
