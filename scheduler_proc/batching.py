"""When waiting requests may join the running ones."""

import math
from typing import Literal

Batching = Literal["continuous", "dynamic", "static"]


class BatchGate:
    """Opens and closes admission.

    *continuous*: requests join whenever there is room (Yu et al. 2022, "Orca"); only an idle engine waits, up to
    `wait` seconds, for `max_seqs` requests to start together. *dynamic*: a batch forms as an idle engine's does, runs
    until its last request ends, and nobody joins it. *static*: as dynamic, but a batch has to be full. The last two
    are what iteration-level scheduling replaced; `tools.simulate` compares with them.
    """

    def __init__(self, batching: Batching, max_seqs: int, wait: float) -> None:
        self._continuous = batching == "continuous"
        self._max_seqs = max_seqs
        self._wait = math.inf if batching == "static" else wait
        self.min_batch = max_seqs  # how many make a batch full: lower when fewer can come
        self._places = 0  # left in the batch that is being admitted

    def places(self, now: float, waiting: int, running: int, oldest: float) -> tuple[int, float | None]:
        """How many may join now, and when to ask again if that is a question of time (`inf`: not of time alone).

        `oldest` is the arrival of the request that has waited longest, in seconds on the clock of `now`.
        """
        if running:
            return (waiting if self._continuous else self._places), None
        if self.delay(now, waiting, oldest) <= 0:
            self._places = min(waiting, self._max_seqs)
            return self._places, None
        return 0, oldest + self._wait

    def delay(self, now: float, waiting: int, oldest: float) -> float:
        """Seconds that an idle engine still waits for its batch to fill; `inf`: until it is full, however long."""
        return 0.0 if waiting >= self.min_batch else max(0.0, oldest + self._wait - now)

    def joined(self) -> None:
        """A request was admitted; the rest of its batch have still their places."""
        self._places = max(0, self._places - 1)
