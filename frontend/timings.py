"""What is told of the times of requests, as JSON."""

from typing import Literal

from msgspec import Struct

Status = Literal["finished", "failed", "aborted"]


class ChoiceTimings(Struct):
    """One choice's way; times in milliseconds after the request's arrival, null where it never came to that."""

    index: int
    queued_ms: float | None
    first_scheduled_ms: float | None
    first_token_ms: float | None
    last_token_ms: float | None
    finished_ms: float | None
    prefill_chunks: list[tuple[float, float, int]]  # planned, result came, tokens
    steps: int
    preemptions: int
    cached_tokens: int
    prompt_tokens: int
    completion_tokens: int


class Timings(Struct, kw_only=True):
    """A request's way. `choices` has those that finished."""

    request_id: str
    arrival: float  # unix seconds: the last bytes of the request came in
    tokenized_ms: float | None  # of several prompts the last
    first_output_ms: float | None  # the frontend had the first that a client is shown, of any choice
    choices: list[ChoiceTimings]


class Failure(Struct):
    status: int  # HTTP's, also of what ended a stream that had begun
    code: str | None


class RequestRecord(Timings, kw_only=True):
    """The same of a request that has ended, as this frontend saw it."""

    route: str
    status: Status
    error: Failure | None
    ended_ms: float  # all of the answer had been handed to the network, or its client was gone


class RequestList(Struct):
    """The newest first. Each frontend process keeps its own."""

    frontend: int  # which of them answers
    frontends: int
    requests: list[RequestRecord]
