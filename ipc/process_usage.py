"""What a process measures of itself: its CPU time, and how late its event loop is."""

import asyncio
import random
import time
from bisect import bisect_left
from collections.abc import Callable

from .stats_messages import LAG_BOUNDS, ProcessUsage

_PERIOD = 0.1  # seconds between two looks at the loop, on average


async def watch_loop(on_lag: Callable[[float], None]) -> None:
    """Call `on_lag` ten times a second with the seconds that the running loop was late; never returns.

    A loop that is busy with one thing, or has many waiting, is late with everything by about as much. Looks come at
    random moments: a container's CPU limit stops a process for a part of each tenth of a second, and after a look at
    the end of such a stop the next one in a tenth of a second would see nothing of it.
    """
    while True:
        period = _PERIOD * random.uniform(0.5, 1.5)
        due = time.monotonic() + period
        await asyncio.sleep(period)
        on_lag(max(0.0, time.monotonic() - due))


class UsageMeter:
    """Counts for the `ProcessUsage` of this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lags = [0] * (len(LAG_BOUNDS) + 1)
        self._lag_seconds = 0.0

    def add_lag(self, seconds: float) -> None:
        """For `watch_loop`."""
        self._lags[bisect_left(LAG_BOUNDS, seconds)] += 1
        self._lag_seconds += seconds

    def usage(self) -> ProcessUsage:
        """What has been used so far."""
        lags = tuple(self._lags) if any(self._lags) else ()
        return ProcessUsage(self._name, time.process_time(), lags, self._lag_seconds)
