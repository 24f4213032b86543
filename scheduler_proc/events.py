"""What goes into the scheduler core and what comes out: plain data, no sockets, no clock.

Times are seconds on one monotonic clock; they come in with the events. Events are tagged, so that `event_log` can write
them as they are.
"""

from msgspec import Struct

from ipc.engine_messages import StepOutputs, StepPlan, StepResult, Submit


class Arrived(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """A tokenizer process submits a request."""

    time: float
    peer: bytes
    submit: Submit


class Aborted(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """Nobody wants these requests any more."""

    time: float
    peer: bytes
    request_ids: tuple[int, ...]


class Stopped(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """A stop string has ended a request."""

    time: float
    peer: bytes
    request_id: int


class PeerLost(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """A tokenizer process is gone, and with it everyone its requests were for."""

    time: float
    peer: bytes


class StepDone(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """The result of the oldest step in flight.

    `ended`: in a replay, the indices of the sampled tokens that ended their request by a stop id or a loop, which the
    recording knows and synthetic token ids cannot tell; None: the core looks at the tokens.
    """

    time: float
    result: StepResult
    ended: tuple[int, ...] | None = None


class EngineLost(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """The ranks are gone, and with them all KV; requests wait for new ranks."""

    time: float
    in_step: bool = False  # a rank said that it failed in a step; else it was killed, or died without a word


class EngineReady(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """All ranks are there, with empty KV."""

    time: float
    after_crash: bool = False  # those before were lost because one of them crashed without a word


class EngineFailed(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """The ranks are gone for good: no request can go on."""

    time: float
    reason: str


class Tick(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """Time has passed, as `WakeAt` asked; or the scheduler has started, and waits for the ranks."""

    time: float


Event = Arrived | Aborted | Stopped | PeerLost | StepDone | EngineLost | EngineReady | EngineFailed | Tick


class SendPlan(Struct, frozen=True, gc=False):
    """To all ranks."""

    plan: StepPlan


class SendOutputs(Struct, frozen=True, gc=False):
    """To one tokenizer process."""

    peer: bytes
    outputs: StepOutputs


class WakeAt(Struct, frozen=True, gc=False):
    """Send a `Tick` at this time, unless any other event comes first; the latest of these counts."""

    time: float


class GiveUpRanks(Struct, frozen=True, gc=False):
    """The ranks have not answered `step` within `seconds`, far longer than it can take: they hang."""

    step: int
    seconds: float


Command = SendPlan | SendOutputs | WakeAt | GiveUpRanks
