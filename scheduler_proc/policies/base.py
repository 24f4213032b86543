"""The plug-in point of scheduling policies: which waiting request starts next."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from config.schema import SchedulerConfig
from scheduler_proc.request import Request


class Policy(ABC):
    """Holds the waiting requests. Times are seconds on the clock of the events.

    A policy decides the order alone; whether the first one fits is the planner's business, and while it does not,
    nobody behind it starts (else a large request could starve). Every policy bounds how long it lets one be overtaken.
    """

    def __init__(self, config: SchedulerConfig, cached_tokens: Callable[[Request], int]) -> None:
        """`cached_tokens(request)`: how many tokens of a waiting request the prefix cache holds at this moment."""
        self._config = config
        self._cached_tokens = cached_tokens

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request waits, or one that was running lost its blocks (`request.preemptions` > 0)."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A waiting request starts, or has ended. KeyError when it does not wait here."""

    @abstractmethod
    def first(self, now: float, longs: bool) -> Request | None:
        """The waiting request to start next; with `longs` False, the first that is not `is_long`."""

    def running_key(self, request: Request) -> tuple[float, int]:
        """Fixed place of a request among the running ones, no two equal: the largest is preempted first."""
        return (0.0, request.order)

    def ahead_of(self, request: Request) -> list[Request]:
        """The waiting requests that would start before an arriving one, as far as that can be told."""
        key = self.running_key(request)
        return [other for other in self if self.running_key(other) < key]

    def served(self, request: Request, tokens: int) -> None:  # noqa: B027  (most policies do not care)
        """So many tokens are being computed for a request."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in any order."""
