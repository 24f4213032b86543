"""The latencies of one request, by the definitions of the design's section 8. All in seconds."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.loadgen.messages import Record
from tools.reports.percentiles import Floats

_NO_FLOATS: Floats = np.empty(0)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of a request that was answered; None where it has none or the server does not say what is needed for it."""

    ttft: float  # from when it was due to its first token
    tpot: float | None  # (last - first) / (n - 1)
    e2e: float  # from when it was due to its last token
    icl: Floats  # between two chunks
    itl: Floats  # the same divided by the later chunk's tokens, once for each of them; empty: those are not known
    tokens: int | None

    @property
    def worst_itl(self) -> float | None:
        """What 99% of its inter-token latencies are within; of fewer than 100 the largest."""
        if not len(self.itl):
            return None
        return float(np.partition(self.itl, rank := int(np.ceil(0.99 * len(self.itl))) - 1)[rank])


def latencies_of(record: Record) -> Latencies:
    """Of a record whose outcome is "ok"."""
    times = np.array(record.times)
    tokens = record.completion_tokens
    if tokens is None and record.tokens:
        tokens = sum(record.tokens)
    gaps: Floats = np.diff(times)
    itl = _NO_FLOATS
    if record.tokens:
        counts = np.array(record.tokens[1:], dtype=np.int64)
        itl = np.repeat(gaps / counts, counts)
    return Latencies(
        ttft=record.times[0] - record.scheduled,
        tpot=(record.times[-1] - record.times[0]) / (tokens - 1) if tokens is not None and tokens > 1 else None,
        e2e=record.times[-1] - record.scheduled,
        icl=gaps,
        itl=itl,
        tokens=tokens,
    )


@dataclass(frozen=True, slots=True)
class ServerLatencies:
    """The same by the server's own timeline, and what only it knows."""

    ttft: float | None  # from arrival until the first text can be sent, as the server's metric has it
    tpot: float | None
    queue: float | None  # until the first step that computes tokens of it
    preemptions: int


def server_latencies(timings: dict[str, Any]) -> ServerLatencies | None:
    """Of the first choice; None for a timeline of another form."""
    try:
        choice = timings["choices"][0]
        first, last, count = choice["first_token_ms"], choice["last_token_ms"], choice["completion_tokens"]
        first_text = timings.get("first_output_ms")  # where the timeline tells it
        queued, scheduled = choice["queued_ms"], choice["first_scheduled_ms"]
        return ServerLatencies(
            ttft=None if (shown := first if first_text is None else first_text) is None else shown / 1e3,
            tpot=None if first is None or last is None or count < 2 else (last - first) / (count - 1) / 1e3,
            queue=None if queued is None or scheduled is None else (scheduled - queued) / 1e3,
            preemptions=choice["preemptions"],
        )
    except (KeyError, IndexError, TypeError):
        return None
