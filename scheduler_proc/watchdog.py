"""Notices ranks that hang: their connection stands, so that nothing but the time of a step tells."""

import math

from scheduler_proc.cost_model import CostModel
from scheduler_proc.planner import Step

_SLOW = 5.0  # times the predicted time of a step
_COLD = 10.0  # times the timeout, as long as nothing can be predicted
_LATE = 1.0  # seconds; a look so long after the deadline says that this process itself was held up


class Watchdog:
    """Watches the step that the ranks work on. Times are seconds on the clock of the events."""

    def __init__(self, cost: CostModel, timeout: float) -> None:
        """`timeout`: seconds that every step may take, however short it is predicted to be; `inf`: any time."""
        self._cost = cost
        self._timeout = timeout
        self._step: Step | None = None
        self._limit = math.inf
        self.deadline = math.inf  # when to look again

    def look(self, step: Step | None, now: float) -> float | None:
        """`step` is the oldest in flight. The seconds it was given once those are over, else None.

        That is said once for each step. A look that comes late gives the step its time again, since its result may
        have arrived and not been read.
        """
        if step is not self._step:
            self._step = step
            self._limit = math.inf if step is None else self._seconds_for(step)
            self.deadline = now + self._limit
        if now < self.deadline:
            return None
        if now > self.deadline + _LATE:
            self.deadline = now + self._limit
            return None
        self.deadline = math.inf
        return self._limit

    def _seconds_for(self, step: Step) -> float:
        if not self._cost.ready:
            return _COLD * self._timeout
        return max(self._timeout, _SLOW * self._cost.predict(step.shape))
