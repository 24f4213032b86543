"""What happens to each request, seen from outside the core: from the events' times and the commands alone."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ipc.codec import unpack_ints
from ipc.engine_messages import RowOutput, StepOutputs, StepPlan
from scheduler_proc.events import Command, SendOutputs, SendPlan
from tools.reports.percentiles import Floats


class Status(IntEnum):
    OPEN = 0  # not ended
    FINISHED = 1
    REFUSED = 2  # 4xx: never started
    FAILED = 3  # 5xx
    ABORTED = 4  # its client left


@dataclass(frozen=True, slots=True)
class Sample:
    """Gauges from one moment until the next sample."""

    time: float  # seconds
    running: int
    waiting: int
    kv_share: float  # of the pool's blocks, those that running requests refer to


def means(samples: Sequence[Sample], field: str, end: float, spans: int) -> Floats:
    """Mean over time of a gauge in each of so many equal spans from 0 to `end` (seconds)."""
    times = np.array([0.0, *(sample.time for sample in samples), end])
    values = np.array([0.0, *(getattr(sample, field) for sample in samples)], dtype=np.float64)
    integral = np.concatenate([[0.0], np.cumsum(values * np.maximum(np.diff(times), 0.0))])
    edges = np.linspace(0.0, end, spans + 1)
    amounts: Floats = np.diff(np.interp(edges, times, integral))
    return amounts / (end / spans)


@dataclass(frozen=True, slots=True)
class Arriving:
    """A request that is being handed to the core as number `number`."""

    number: int
    peer: bytes
    request_id: int
    time: float


class Observer:
    """Times of the requests 0 to n - 1, in seconds; NaN where something has not happened.

    Each request's `SamplingSpec.seed` must be its number: that is what tells whose a row of a plan is.
    """

    def __init__(self, num_requests: int, *, keep_outputs: bool = False) -> None:
        """`keep_outputs`: collect token ids in `outputs`."""
        self.arrival: Floats = np.full(num_requests, np.nan)
        self.started: Floats = np.full(num_requests, np.nan)  # first time in a plan
        self.first: Floats = np.full(num_requests, np.nan)  # first token
        self.last: Floats = np.full(num_requests, np.nan)  # newest token
        self.num_tokens = np.zeros(num_requests, dtype=np.int64)
        self.status = np.zeros(num_requests, dtype=np.int8)
        self.outputs: list[array[int]] | None = [array("i") for _ in range(num_requests)] if keep_outputs else None
        self.end = 0.0  # time of the last output
        self.samples: list[Sample] = []
        self._gaps: list[Floats] = []
        self._gap_owners: list[npt.NDArray[np.int64]] = []  # whose they are
        self._numbers: dict[bytes, dict[int, int]] = {}  # peer -> request id -> number
        self._rows: dict[int, int] = {}  # the worker's rows, as the newest plan leaves them

    @property
    def gaps(self) -> Floats:
        """Inter-token latencies of all requests; k tokens that came at once count as k equal gaps."""
        return np.concatenate(self._gaps) if self._gaps else np.zeros(0)

    def gaps_by_request(self) -> list[Floats]:
        """The same, of each request in the order of its tokens."""
        owners = np.concatenate(self._gap_owners) if self._gap_owners else np.zeros(0, dtype=np.int64)
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(np.bincount(owners, minlength=len(self.arrival)))
        return np.split(self.gaps[order], ends[:-1])

    def number_of(self, peer: bytes, request_id: int) -> int | None:
        return self._numbers.get(peer, {}).get(request_id)

    def number_of_row(self, row: int) -> int:
        """Whose row this is after the newest plan."""
        return self._rows[row]

    def see(self, time: float, commands: list[Command], arriving: Arriving | None = None) -> list[StepPlan]:
        """Take in what the core answered to an event; returns the plans in it."""
        plans = []
        duplicate = None if arriving is None else self._arrive(arriving)
        for command in commands:
            if isinstance(command, SendPlan):
                self._see_plan(time, command.plan)
                plans.append(command.plan)
            elif isinstance(command, SendOutputs):
                self._see_outputs(time, command.peer, command.outputs, duplicate)
        return plans

    def aborted(self, number: int) -> None:
        if self.status[number] == Status.OPEN:
            self.status[number] = Status.ABORTED

    def abort_all(self, peer: bytes) -> None:
        """Everyone its open requests were for is gone."""
        for number in self._numbers.get(peer, {}).values():
            self.aborted(number)

    def stopped(self, number: int, time: float) -> None:
        """A stop string ended it."""
        if self.status[number] == Status.OPEN:
            self.status[number] = Status.FINISHED
            self.end = max(self.end, time)

    def _arrive(self, arriving: Arriving) -> Arriving | None:
        """Returns it again when its id is in use: the older request keeps the id, and the refusal is of this one."""
        self.arrival[arriving.number] = arriving.time
        numbers = self._numbers.setdefault(arriving.peer, {})
        older = numbers.get(arriving.request_id)
        if older is not None and self.status[older] == Status.OPEN:
            self.status[arriving.number] = Status.REFUSED
            return arriving
        numbers[arriving.request_id] = arriving.number
        return None

    def _see_plan(self, time: float, plan: StepPlan) -> None:
        for new in plan.new_rows:
            number = new.sampling.seed
            self._rows[new.row] = number
            if np.isnan(self.started[number]):
                self.started[number] = time

    def _see_outputs(self, time: float, peer: bytes, outputs: StepOutputs, duplicate: Arriving | None) -> None:
        numbers = self._numbers[peer]
        self.end = max(self.end, time)
        if outputs.plain_ids:
            ids = [numbers[request_id] for request_id in array("q", outputs.plain_ids)]
            self._take_tokens(time, np.array(ids, dtype=np.int64))
            if self.outputs is not None:
                for number, token in zip(ids, unpack_ints(outputs.plain_tokens), strict=True):
                    self.outputs[number].append(token)
        for row in outputs.rows:
            number = numbers[row.request_id]
            if isinstance(row, RowOutput):
                tokens = unpack_ints(row.token_ids)
                if tokens:
                    self._take_row(time, number, len(tokens))
                if self.outputs is not None:
                    self.outputs[number].extend(tokens)
                if row.finish is not None:
                    self.status[number] = Status.FINISHED
            elif duplicate is None or (peer, row.request_id) != (duplicate.peer, duplicate.request_id):
                self.status[number] = Status.REFUSED if row.status < 500 else Status.FAILED

    def _take_tokens(self, time: float, numbers: npt.NDArray[np.int64]) -> None:
        """One token for each of these requests."""
        last = self.last[numbers]
        fresh = np.isnan(last)
        if fresh.any():
            self.first[numbers[fresh]] = time
            last = last[~fresh]
        self._gaps.append(time - last)
        self._gap_owners.append(numbers[~fresh])
        self.last[numbers] = time
        self.num_tokens[numbers] += 1

    def _take_row(self, time: float, number: int, count: int) -> None:
        last = self.last[number]
        if np.isnan(last):
            self.first[number] = time
        else:
            self._gaps.append(np.full(count, (time - last) / count))
            self._gap_owners.append(np.full(count, number))
        self.last[number] = time
        self.num_tokens[number] += count
