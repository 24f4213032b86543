"""When the parts of a step begin and end, where its work is done: on this CPU, or on a GPU's stream."""

import time
from abc import ABC, abstractmethod
from typing import Any

import torch

Mark = Any  # what `Clock.mark` returned


class Clock(ABC):
    @abstractmethod
    def mark(self) -> Mark:
        """The point at which all work that was started before is done, as far as this clock's device is concerned."""

    @abstractmethod
    def is_done(self, mark: Mark) -> bool:
        """Whether the work before it is done."""

    @abstractmethod
    def microseconds(self, begin: Mark, end: Mark) -> int:
        """Between two marks, of which the work before is done or nearly so."""


class HostClock(Clock):
    """For work that is done when its call returns."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def is_done(self, mark: int) -> bool:
        return True

    def microseconds(self, begin: int, end: int) -> int:
        return (end - begin) // 1000


class StreamClock(Clock):
    """For the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_done(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def microseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
        end.synchronize()
        return int(1000 * begin.elapsed_time(end))
