"""Notices processes that hang without dying, whatever they are: each is asked again and again whether it is there.

A process answers from the event loop that does its work. A rank, whose step may take long, answers from a thread, so
that only one that is stopped as a whole is noticed here; its steps are watched by the scheduler, which knows how long
they take and gives up first.
"""

import math

from ipc.control import Ping
from launch.fleet import Fleet
from launch.process import Process

_PINGS = 4  # within the timeout
_LONGEST_PAUSE = 5.0  # seconds between two pings
_RANK_PATIENCE = 2  # times the timeout
_LATE = 1.0  # seconds; a look so long after its time says that this process, or the machine, was held up itself


class Heartbeats:
    """Of the ready processes of `fleet`. Times are seconds on the monotonic clock."""

    def __init__(self, fleet: Fleet, timeout: float) -> None:
        """`timeout`: seconds within which each has to answer."""
        self._fleet = fleet
        self._timeout = timeout
        self._pause = min(_LONGEST_PAUSE, timeout / _PINGS)
        self.deadline = -math.inf  # when to look again

    def look(self, now: float) -> list[Process]:
        """Those that have not answered in time, each with its `hang` set; they are to be killed."""
        if now < self.deadline:
            return []
        late = now > self.deadline + _LATE
        self.deadline = now + self._pause
        hanging = []
        for process in self._fleet.processes:
            if not process.ready or not process.alive or process.told_to_end or process.hang is not None:
                continue
            limit = self._timeout * (_RANK_PATIENCE if process.role == "worker" else 1)
            if process.pinged is None:
                process.pinged = now
                process.order(Ping())
            elif late:
                process.pinged = now  # its answer may have arrived and not been read, or it was held up as this was
            elif now - process.pinged >= limit:
                process.hang = f"no sign of life for {limit:g} s"
                hanging.append(process)
        return hanging
