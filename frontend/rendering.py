"""What is sent for the outputs of one request: one class for each API, by what streaming and handlers need of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from msgspec import UNSET, UnsetType

from ipc.messages import PromptInfo

from .errors import ApiError
from .generation import Batch
from .protocol import Usage
from .timings import Timings


class Renderer(ABC):
    """Builds the answer to one request, either as a stream (`chunks`, then `end`) or as one body (`whole`)."""

    prompt_of: Callable[[int], PromptInfo]  # by index of a choice that has begun; for jobs that ask for it
    keep_alive = b": keep-alive\n\n"  # what a silent stream gets from time to time
    _timings: Callable[[], Timings] | None = None

    def tell_timings(self, timings: Callable[[], Timings]) -> None:
        """Let the end of the answer tell them; `timings` is called once all choices have finished."""
        self._timings = timings

    @property
    def timings(self) -> Timings | UnsetType:
        """Those of the answer's last part, or its member that is left out."""
        return UNSET if self._timings is None else self._timings()

    @abstractmethod
    def chunks(self, batch: Batch) -> bytes:
        """Server-sent events for what arrived together; empty when nothing is to be said yet."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """The events after all choices have finished."""

    @abstractmethod
    def whole(self, batches: Iterable[Batch], usage: Usage) -> bytes:
        """The body for a request that does not stream."""

    def error(self, error: ApiError) -> bytes:
        """The last event of a stream that fails after its beginning."""
        return b"data: " + error.encode() + b"\n\n"
