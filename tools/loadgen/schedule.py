"""From requests to what each worker sends when, and which of it is measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tools.loadgen.messages import Item
from tools.loadgen.sources import Request
from tools.loadgen.synthetic import Arrivals


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds that are left out of what is measured.

    In the ramp, at the beginning, the rate rises from nothing; the warm-up follows it; the cool-down is the end, in
    which the load that the last requests see is less than it was.
    """

    ramp: float = 0.0
    warmup: float = 0.0
    cooldown: float = 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a run sends. Of a closed loop, `end` is when nothing more is sent; infinity: when all has been."""

    items: list[Item]
    arrivals: Arrivals
    measured_from: float
    measured_to: float  # of the time at which requests are due
    end: float = math.inf

    @property
    def closed(self) -> bool:
        return self.arrivals.users > 0

    def measures(self, due: float) -> bool:
        return self.measured_from <= due <= self.measured_to

    @property
    def measures_something(self) -> bool:
        """In a closed loop it can only be said whether there is time for it."""
        if self.closed:
            return self.measured_from <= self.measured_to
        return any(self.measures(item.due) for item in self.items)


def ramped(time: float, ramp: float) -> float:
    """A moment moved so that the rate rises linearly from 0 within `ramp` seconds; the order stays."""
    return math.sqrt(2 * ramp * time) if time < ramp / 2 else time + ramp / 2


def open_loop(
    requests: Sequence[Request], arrivals: Arrivals, phases: Phases, duration: float | None = None
) -> Schedule:
    """Each request when its source says; none after `duration` seconds."""
    placed = [replace(request, time=ramped(request.time, phases.ramp)) for request in requests]
    if duration is not None:
        placed = [request for request in placed if request.time <= duration]
    items = [_item(index, request, request.time) for index, request in enumerate(placed)]
    last = placed[-1].time
    return Schedule(items, arrivals, phases.ramp + phases.warmup, last - phases.cooldown)


def closed_loop(
    requests: Sequence[Request], arrivals: Arrivals, phases: Phases, duration: float | None = None
) -> Schedule:
    """Users that each send their next request when they have had an answer; in the ramp one begins after the other."""
    items = []
    for index, request in enumerate(requests):
        user = index % arrivals.users
        due = arrivals.think if index >= arrivals.users else phases.ramp * user / arrivals.users
        item = _item(index, request, due)
        item.user = user
        items.append(item)
    end = math.inf if duration is None else duration
    return Schedule(items, arrivals, phases.ramp + phases.warmup, end - phases.cooldown, end)


def at_rate(requests: Sequence[Request], rate: float, seconds: float) -> list[Request]:
    """The first requests, as many as come within `seconds` at `rate` a second, their times stretched to that rate.

    ValueError when they come at one moment, or are fewer than two.
    """
    chosen = requests[: max(2, round(rate * seconds))]
    span = chosen[-1].time - chosen[0].time if len(chosen) > 1 else 0.0
    if span <= 0:
        raise ValueError("all requests of a probe come at one moment")
    stretch = (len(chosen) - 1) / rate / span
    return [replace(request, time=request.time * stretch) for request in chosen]


def dealt(items: Sequence[Item], processes: int, closed: bool) -> list[list[Item]]:
    """Round robin; a user of a closed loop stays with one process."""
    hands: list[list[Item]] = [[] for _ in range(processes)]
    for item in items:
        hands[(item.user if closed else item.index) % processes].append(item)
    return hands


def _item(index: int, request: Request, due: float) -> Item:
    return Item(
        index=index,
        due=due,
        input_length=request.input_length,
        output_length=request.output_length,
        blocks=None if request.blocks is None else list(request.blocks),
        block_size=request.block_size,
        text=request.text,
        body=request.body,
        path=request.path,
    )
