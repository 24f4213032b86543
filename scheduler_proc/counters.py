"""What the core counts: totals since its start, for people and for programs that look for what is slow."""

from bisect import bisect_left
from dataclasses import dataclass, field

from ipc.engine_messages import StepResult
from ipc.stats_messages import STEP_TOKEN_BOUNDS, StepLimit


@dataclass(slots=True)
class Counters:
    """Tokens and requests are counted, `_us` are microseconds that rank 0 has told, seconds are the core's own time."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    loop_stops: int = 0
    recoveries: int = 0
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    score_us: int = 0
    between_us: int = 0
    empty_seconds: float = 0.0  # without a step in flight, and without requests
    starved_seconds: float = 0.0  # without a step in flight, although there were requests
    limits: dict[StepLimit, int] = field(default_factory=dict)  # steps by what limited them
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    _told_at: float | None = None

    @property
    def device_busy_us(self) -> int:
        return self.prepare_us + self.forward_us + self.sample_us + self.score_us

    def count_plan(self, limit: StepLimit) -> None:
        """A step has been planned."""
        self.limits[limit] = self.limits.get(limit, 0) + 1

    def count_step(self, result: StepResult, decodes: int, prefill_tokens: int) -> None:
        """A step has come back that computed so many tokens."""
        tokens = decodes + prefill_tokens
        self.computed_tokens += tokens
        self.prefill_tokens += prefill_tokens
        if tokens:  # else it only copied blocks
            self.step_tokens[bisect_left(STEP_TOKEN_BOUNDS, tokens)] += 1
        self.prepare_us += result.prepare_us
        self.forward_us += result.forward_us
        self.sample_us += result.sample_us
        self.score_us += result.score_us
        self.between_us += result.between_us

    def pass_time(self, now: float, *, idle: bool, has_requests: bool) -> None:
        """Time has passed in this state up to `now`; `idle`: the engine is ready, and no step is in flight."""
        self.empty_seconds, self.starved_seconds = self.idle_until(now, idle=idle, has_requests=has_requests)
        self._told_at = now

    def idle_until(self, now: float, *, idle: bool, has_requests: bool) -> tuple[float, float]:
        """`empty_seconds` and `starved_seconds`, should nothing happen until `now`."""
        passed = now - self._told_at if idle and self._told_at is not None else 0.0
        return self.empty_seconds + passed * (not has_requests), self.starved_seconds + passed * has_requests
