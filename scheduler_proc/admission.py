"""When an arriving request would get its first token, so that one that would get it too late is refused at once."""

import math

from scheduler_proc.cost_model import MIN_PREFILL, CostModel, StepShape

_RATE = 1 / 32  # of the running means over finished requests
_MAX_RETRY_AFTER = 60  # seconds; what is predicted to take longer is not that well known


class Outages:
    """When ranks that are missing will be back: after as long as the last time, which may have been their start."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0  # seconds

    def begin(self, now: float) -> None:
        """The ranks are missing, from now on or already."""
        if self._began is None:
            self._began = now

    def end(self, now: float) -> None:
        """All ranks are there."""
        if self._began is not None:
            self._last = now - self._began
            self._began = None

    def left(self, now: float) -> float:
        """Seconds until the ranks are there; 0 also when it takes longer than the last time, or is the first time."""
        return 0.0 if self._began is None else max(0.0, self._began + self._last - now)


class TtftPredictor:
    """Predicts the time to first token from the queue ahead, the cost model and how long requests have been running."""

    def __init__(self, cost: CostModel, max_step_tokens: int, max_itl: float | None) -> None:
        """`max_itl`: the planner's limit for a step with running streams, in seconds."""
        self._cost = cost
        self._max_step_tokens = max_step_tokens
        self._max_itl = max_itl
        self._finished = 0
        self._stay = 0.0  # running mean of the seconds from start to end
        self._outputs = 0.0  # running mean of output tokens

    def observe_finish(self, seconds_running: float, output_tokens: int) -> None:
        """A request finished so long after it was started."""
        self._finished += 1
        rate = max(_RATE, 1 / self._finished)  # at first the plain mean
        self._stay += rate * (seconds_running - self._stay)
        self._outputs += rate * (output_tokens - self._outputs)

    def predict(
        self,
        *,
        own_tokens: int,
        tokens_ahead: int,
        requests_ahead: int,
        running: int,
        free_rows: int,
        decode_context: int,
        delay: float = 0.0,
    ) -> float:
        """Seconds until the first token; 0 until the cost model is ready: nobody is refused on ignorance.

        own_tokens: prompt tokens that are not cached. tokens_ahead: the same of all waiting requests that would go
        first, and what running prefills still miss. requests_ahead: the number of those waiting requests. running:
        requests that run. free_rows: requests that could start now (negative when more run than should).
        decode_context: tokens of context of the running ones together. delay: seconds before anything can start, since
        the ranks are missing or a batch is to fill.

        The request starts when the tokens ahead are computed and a row is free for it, whichever is later, since rows
        fall free while prompts are computed; then its own tokens are computed. More ahead never predicts earlier.
        """
        if not self._cost.ready:
            return 0.0
        decodes = StepShape(decode_rows=running, context_tokens=decode_context)
        chunk = self._chunk(decodes, own_tokens)
        row = self._seconds_to_row(requests_ahead - free_rows + 1, running + max(0, free_rows), decodes)
        return delay + max(
            self._seconds(tokens_ahead + own_tokens, own_tokens, chunk, decodes),
            row + self._seconds(own_tokens, own_tokens, chunk, decodes),
        )

    def _chunk(self, decodes: StepShape, own_tokens: int) -> int:
        """Prefill tokens a step, half-way through the prompt."""
        room = max(1, self._max_step_tokens - decodes.decode_rows)
        if self._max_itl is None or not decodes.decode_rows:
            return room
        # Where not even a small chunk is affordable now, streams will end and make room; so it is not forever.
        affordable = self._cost.affordable_prefill_tokens(self._max_itl, decodes, own_tokens // 2, room)
        return max(min(MIN_PREFILL, room), affordable)

    def _seconds(self, tokens: int, own_tokens: int, chunk: int, decodes: StepShape) -> float:
        """Time to compute so many prompt tokens, of prompts that are all taken to be as long as the request's own."""
        steps = -(-tokens // chunk)
        _, per_token, _, per_context, per_pair = self._cost.coefficients
        chunks = steps * (self._cost.predict(decodes) + per_context * own_tokens / 2)
        return chunks + tokens * (per_token + per_pair * own_tokens / 2)

    def _seconds_to_row(self, completions: int, rows: int, decodes: StepShape) -> float:
        """Time until so many requests have ended, of `rows` whose ends are evenly spread over their stay."""
        if completions <= 0:
            return 0.0
        # The steps of today may be slower than those of the requests that have finished.
        stay = max(self._stay, self._outputs * self._cost.predict(decodes))
        return stay * completions / max(1, rows)


def retry_after(predicted: float, target: float) -> int:
    """Whole seconds, 1 to 60, after which the queue will have drained enough to meet the target. Both in seconds."""
    return min(_MAX_RETRY_AFTER, max(1, math.ceil(predicted - target)))
