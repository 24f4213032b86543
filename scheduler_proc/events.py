"""What goes into the scheduler core and what comes out: plain data, no sockets, no clock.

Times are seconds on one monotonic clock; they come in with the events.
"""

from msgspec import Struct

from ipc.messages import Failed, RowOutput, StepPlan, StepResult, Submit


class Arrived(Struct, frozen=True, gc=False):
    """A tokenizer process submits a request."""

    time: float
    peer: bytes
    submit: Submit


class Aborted(Struct, frozen=True, gc=False):
    """Nobody wants these requests any more."""

    time: float
    peer: bytes
    request_ids: tuple[int, ...]


class Stopped(Struct, frozen=True, gc=False):
    """A stop string ended a request after `num_tokens` outputs."""

    time: float
    peer: bytes
    request_id: int
    num_tokens: int


class PeerLost(Struct, frozen=True, gc=False):
    """A tokenizer process is gone, and with it everyone its requests were for."""

    time: float
    peer: bytes


class StepDone(Struct, frozen=True, gc=False):
    """The result of the oldest step in flight."""

    time: float
    result: StepResult


class EngineLost(Struct, frozen=True, gc=False):
    """The ranks are gone: no request can go on."""

    time: float
    reason: str


Event = Arrived | Aborted | Stopped | PeerLost | StepDone | EngineLost


class SendPlan(Struct, frozen=True, gc=False):
    """To all ranks."""

    plan: StepPlan


class SendOutputs(Struct, frozen=True, gc=False):
    """To one tokenizer process."""

    peer: bytes
    rows: tuple[RowOutput | Failed, ...]


Command = SendPlan | SendOutputs
