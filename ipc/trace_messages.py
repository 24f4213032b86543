"""What processes tell of their work while somebody takes a trace (PUB; may be lost). Its form is that of `messages`.

Times are seconds of the monotonic clock, which the engine's processes share.
"""

from .messages import Message, Timings


class TracedRequest(Message, frozen=True):
    """An HTTP request that has ended."""

    request_id: str
    route: str
    status: str
    arrival: float
    first_output: float  # 0.0: there was none
    ended: float
    choices: tuple[Timings | None, ...]  # those that finished


class TracedEncoding(Message, frozen=True):
    """A prompt became token ids, and its grammar, if it has one, was compiled."""

    request_id: str
    start: float
    end: float
    tokens: int


class TracedDetokenizing(Message, frozen=True):
    """A step's outputs became text."""

    start: float
    end: float
    tokens: int


class PlannedStep(Message, frozen=True):
    step: int
    tokens: int  # prefill and decode together
    prefill_rows: int
    decode_rows: int


class TracedPlanning(Message, frozen=True):
    """An event was taken in that led to new steps."""

    start: float
    end: float
    steps: tuple[PlannedStep, ...]


class TracedStep(Message, frozen=True):
    """A step's result came; how long its parts took is what the rank says (see `StepResult`)."""

    step: int
    end: float
    prepare_us: int
    forward_us: int
    sample_us: int
    score_us: int


class Trace(Message, frozen=True):
    """What one process has to tell since it last did."""

    process: str  # role and index: "tokenizer-0"
    items: tuple[TracedRequest | TracedEncoding | TracedDetokenizing | TracedPlanning | TracedStep, ...]
    lost: int  # items that there was no room for
