"""`fake_launch` in a process of its own, and what its children have written down."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
Behaviour = str | list[str]  # of a fake role, see there
PATIENCE = 30.0  # seconds; only how long a test that fails takes


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Launcher:
    """A `fake_launch` process and the log that its children write.

    `run_parent`: where it makes the run's directory. Its path must be short, or the launcher goes elsewhere with its
    sockets; those of tests are too long where several run at once (`pytest -n`).
    """

    def __init__(
        self, folder: Path, run_parent: Path, *arguments: str, behaviour: dict[str, Behaviour] | None = None
    ) -> None:
        self.log_file = folder / "events.log"
        self.log_file.touch()
        self.run_parent = run_parent
        environment = os.environ | {
            "FAKE_LOG": str(self.log_file),
            "FAKE_BEHAVIOUR": json.dumps(behaviour or {}),
            "XDG_RUNTIME_DIR": str(self.run_parent),
            "PYTHONPATH": str(REPOSITORY),
        }
        self.error_file = folder / "stderr"
        self.output_file = folder / "stdout"
        with self.error_file.open("wb") as errors, self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.processes.fake_launch", *arguments],
                env=environment,
                stdout=output,
                stderr=errors,
                cwd=folder,
            )

    @property
    def events(self) -> list[str]:
        return self.log_file.read_text().splitlines()

    @property
    def errors(self) -> str:
        return self.error_file.read_text()

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def pids(self, name: str = "") -> list[int]:
        return [int(event.split()[2]) for event in self.events if event.startswith(name) and event.split()[1] == "pid"]

    def wait_ready(self) -> None:
        wait_for(lambda: "ready http" in self.output or self.process.poll() is not None, "the ready line")
        assert self.process.poll() is None, self.errors

    def wait_end(self) -> int:
        status = self.process.wait(PATIENCE)
        assert [pid for pid in self.pids() if is_alive(pid)] == []
        assert list(self.run_parent.iterdir()) == []
        return status

    def lives(self, name: str) -> int:
        """How often a process of this place was started."""
        return len(self.pids(name))

    def position(self, event: str) -> int:
        assert event in self.events, (event, self.events)
        return self.events.index(event)
