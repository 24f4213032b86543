"""How long a step takes: linear in four properties of its plan, those that `scheduler_proc.cost_model` fits online."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np

from ipc.engine_messages import StepPlan

PARTS = ("fixed", "prefill tokens", "decode rows", "context", "prefill pairs")

# Of `fit_cost`: features are scaled to their mean, so this is a share of what a mean step has of it.
_NEGLIGIBLE = 1e-12


class CostError(Exception):
    """Costs that cannot be used; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What the cost of a step depends on, defined as in `scheduler_proc.cost_model.StepShape`, and a few sizes."""

    prefill_tokens: int
    decode_rows: int
    context_tokens: int
    prefill_context: float
    rows: int  # all that are scheduled
    sampled: int
    copies: int  # blocks between KV pool and host


def shape_of(plan: StepPlan) -> PlanShape:
    """Read off the plan. A row with one token that is sampled from counts as decode."""
    columns = np.frombuffer(plan.scheduled, dtype=np.int32).reshape(-1, 4).astype(np.int64)
    starts, counts, samples = columns[:, 1], columns[:, 2], columns[:, 3]
    sampled = int(samples.sum())
    copies = (len(plan.copies_out) + len(plan.copies_in)) // 8
    if len(columns) == sampled == counts.sum():  # decode alone, which is most steps
        return PlanShape(0, sampled, int(starts.sum()), 0.0, sampled, sampled, copies)
    decode = (counts == 1) & (samples == 1)
    prefill_starts, prefill_counts = starts[~decode], counts[~decode]
    return PlanShape(
        int(prefill_counts.sum()),
        int(decode.sum()),
        int(starts.sum()),
        float((prefill_counts * (prefill_starts + prefill_counts / 2)).sum()),
        len(columns),
        sampled,
        copies,
    )


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds: for a step, and for each unit of what `PARTS` names after it."""

    fixed: float
    prefill_token: float
    decode_row: float
    context_token: float
    prefill_context: float

    def parts(self, shape: PlanShape) -> tuple[float, float, float, float, float]:
        """Seconds that each of `PARTS` takes in such a step."""
        return (
            self.fixed / 1e6,
            self.prefill_token * shape.prefill_tokens / 1e6,
            self.decode_row * shape.decode_rows / 1e6,
            self.context_token * shape.context_tokens / 1e6,
            self.prefill_context * shape.prefill_context / 1e6,
        )

    def seconds(self, shape: PlanShape, copy_us: float) -> float:
        """Duration of a step. Copies of blocks run beside its forward and make it longer only when they take longer."""
        forward = sum(self.parts(shape)) if shape.rows else 0.0
        return max(forward, shape.copies * copy_us / 1e6)

    def __str__(self) -> str:
        return ",".join(f"{value:.6g}" for value in astuple(self))


# SmolLM2-135M (Q4_1 file) on the native CPU kernels with two cores, in round numbers: from "Whole steps in one process"
# of docs/measurements.md; context and pairs as fitted to a recorded server.
DEFAULT_COST = StepCost(5_000.0, 900.0, 1_100.0, 0.6, 0.6)


def parse_cost(text: str) -> StepCost:
    """`a,b,c,d,e` in microseconds; CostError when it is not that."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != len(PARTS) or not all(0 <= value < float("inf") for value in values):
        raise CostError(
            f"--cost: must be {len(PARTS)} numbers of microseconds from 0 on ({', '.join(PARTS)}) or fit:LOG, "
            f"not {text!r}"
        )
    if values[0] == 0:
        raise CostError("--cost: the first number, the time of a step as such, must be above 0")
    return StepCost(*values)


@dataclass(frozen=True, slots=True)
class CostFit:
    """Costs and how well they tell the durations that they were fitted to."""

    cost: StepCost
    steps: int
    median_error: float  # share of a step's duration


def fit_cost(samples: Iterable[tuple[PlanShape, float]]) -> CostFit:
    """Non-negative least squares over (shape, seconds) of measured steps. CostError for fewer than 10 steps.

    A cost that would come out negative is fixed at 0 and the others fitted again, until none is: an active-set method
    that only ever removes (exact here in all but contrived cases, since more work never makes a step faster).
    """
    rows = []
    times = []
    for shape, seconds in samples:
        if shape.rows and seconds > 0:
            rows.append((1.0, shape.prefill_tokens, shape.decode_rows, shape.context_tokens, shape.prefill_context))
            times.append(seconds * 1e6)
    if len(rows) < 10:
        raise CostError(f"--cost: the log has {len(rows)} measured steps; at least 10 are needed")
    features = np.array(rows, dtype=np.float64)
    measured = np.array(times)
    scale = features.mean(axis=0)
    active = [column for column in range(len(PARTS)) if scale[column] > _NEGLIGIBLE]
    values = np.zeros(len(PARTS))
    while active:
        # Relative errors: a short decode step matters as much as a long prefill.
        scaled = features[:, active] / scale[active] / measured[:, None]
        solution, *_ = np.linalg.lstsq(scaled, np.ones(len(measured)), rcond=None)
        if (solution >= 0).all():
            values[active] = solution / scale[active]
            break
        active = [column for column, value in zip(active, solution, strict=True) if value >= 0]
    errors = np.abs(features @ values - measured) / measured
    return CostFit(StepCost(*(float(value) for value in values)), len(rows), float(np.median(errors)))
