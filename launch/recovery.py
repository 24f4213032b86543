"""What follows a death while the engine serves: who is replaced, how often, and how long the others wait for it.

A tokenizer or a frontend is replaced alone: its requests have failed, everyone else goes on. A rank takes the other
ranks with it, since they hold shares of one state and may hang in a collective; the scheduler keeps the requests
meanwhile. The scheduler takes all ranks with it, since their rows are those of its requests.

Nothing here waits: deaths are noted as they come, and `step` does what can be done about them by now.
"""

import signal
import time
from collections import deque
from collections.abc import Container

from config.schema import SupervisorConfig
from ipc.control import StartError, Unresponsive
from launch.fleet import Fleet
from launch.process import Process
from launch.progress import StartDisplay

_RESTART_WINDOW = 60.0  # seconds in which deaths are counted


class _Outage:
    """Processes that are replaced together: the old ones until all have ended, then their successors."""

    def __init__(self, cause: str, processes: list[Process], began: float, limit: float, limit_flag: str) -> None:
        self.cause = cause
        self.processes = processes
        self.began = began
        self.limit = limit  # seconds
        self.limit_flag = limit_flag
        self.spawned = False

    @property
    def deadline(self) -> float:
        return self.began + self.limit

    @property
    def names(self) -> str:
        return ", ".join(process.name for process in self.processes)


class Recovery:
    """Replaces processes of `fleet` while `active`; at other times, and without restarts, a death is final."""

    def __init__(self, settings: SupervisorConfig, fleet: Fleet, display: StartDisplay) -> None:
        self.active = False
        self._settings = settings
        self._fleet = fleet
        self._display = display
        self._dead: list[Process] = []  # not dealt with yet
        self._deaths: deque[float] = deque()  # times of the latest
        self._outages: list[_Outage] = []

    @property
    def deadline(self) -> float | None:
        """When `step` has to run at the latest, on the monotonic clock."""
        return min((outage.deadline for outage in self._outages), default=None)

    def died(self, process: Process) -> None:
        """Note a process that ended without having been told to, or that hangs."""
        self._dead.append(process)

    def hangs(self, report: Unresponsive) -> bool:
        """Take the rank that answers for all as dead, if it is still the one that was meant; whether it is.

        Not only once it has ended: one that waits for its device inside the kernel cannot even be killed.
        """
        for process in self._fleet.of("worker"):
            if process.index or process.hang is not None or process.told_to_end:
                continue
            if process.incarnation == report.incarnation:
                process.hang = report.problem
                self.died(process)
                return True
        return False

    def forget(self, processes: Container[Process]) -> None:
        """These are not needed any more: do not wait for them, nor replace them."""
        for outage in self._outages:
            outage.processes = [process for process in outage.processes if process not in processes]
        self._outages = [outage for outage in self._outages if outage.processes]

    async def step(self) -> str | None:
        """Do what can be done by now; the reason to give up, if there is one."""
        dead, self._dead = self._dead, []
        for process in dead:
            if not process.told_to_end and (problem := self._deal_with(process, time.monotonic())):
                return problem
        for outage in list(self._outages):
            if outage.spawned and all(process.ready for process in outage.processes):
                self._outages.remove(outage)
                verb = "is" if len(outage.processes) == 1 else "are"
                self._display.say(f"{outage.names} {verb} back after {time.monotonic() - outage.began:.1f} s")
            elif time.monotonic() >= outage.deadline:
                late = ", ".join(f"{p.name} is at '{p.stage}'" for p in outage.processes if not p.ready)
                return f"{outage.cause} and was not back within --{outage.limit_flag} {outage.limit:g} seconds: {late}"
            elif not outage.spawned and not any(process.alive for process in outage.processes):
                try:
                    outage.processes = await self._fleet.replace(outage.processes)
                except StartError as error:
                    return f"{outage.cause}; {error}"
                outage.spawned = True
        return None

    def _deal_with(self, process: Process, now: float) -> str | None:
        cause = process.ending()
        allowed = self._settings.max_restarts
        if not self.active or not allowed or process.start_failure is not None:
            return cause
        self._deaths.append(now)
        while self._deaths[0] < now - _RESTART_WINDOW:
            self._deaths.popleft()
        if len(self._deaths) > allowed:
            return f"{cause}; giving up, as --max-restarts allows {allowed} within a minute"
        outage = self._begin_outage(process, cause, now)
        count = f"{len(self._deaths)} of {allowed} restarts within a minute"
        self._display.say(f"{cause}; restarting {outage.names} ({count})")
        return None

    def _begin_outage(self, process: Process, cause: str, now: float) -> _Outage:
        group = self._replaced_with(process)
        began = now
        earlier = self._outages
        self.forget(group)
        for outage in earlier:
            if not outage.processes:
                began = min(began, outage.began)  # who has been waiting since then goes on waiting
        for other in group:
            other.told_to_end = True
            other.send_signal(signal.SIGKILL)
        if process.role == "worker":
            outage = _Outage(cause, group, began, self._settings.recovery_timeout, "recovery-timeout")
        else:
            outage = _Outage(cause, group, began, self._settings.ready_timeout, "ready-timeout")
        self._outages.append(outage)
        return outage

    def _replaced_with(self, process: Process) -> list[Process]:
        match process.role:
            case "worker":
                return self._fleet.of("worker")
            case "scheduler":
                return [process, *self._fleet.of("worker")]
            case _:
                return [process]
