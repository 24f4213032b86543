"""How long a step takes: linear in four properties of its plan, those that `scheduler_proc.cost_model` fits online.

Measured steps also say by how much single steps differ from that, and a client by how much time passes outside of them.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from ipc.engine_messages import StepPlan

PARTS = ("fixed", "prefill tokens", "decode rows", "context", "prefill pairs")

# Of `fit_variation`: steps of one class that say something, and factors that are kept of them.
_FEWEST_OF_A_CLASS = 20
_FACTORS = 50
_NONE = [1.0]

# Of `fit_cost`: features are scaled to their mean, so this is a share of what a mean step has of it.
_NEGLIGIBLE = 1e-12


# As files may have them.
_Microseconds = Annotated[float, Meta(ge=0, le=1e12)]
_Factors = Annotated[list[Annotated[float, Meta(gt=0, le=1e9)]], Meta(min_length=1)]


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

    fixed: _Microseconds
    prefill_token: _Microseconds
    decode_row: _Microseconds
    context_token: _Microseconds
    prefill_context: _Microseconds

    def parts(self, shape: PlanShape) -> tuple[float, float, float, float, float]:
        """Seconds that each of `PARTS` takes in such a step."""
        return (
            self.fixed / 1e6,
            self.prefill_token * shape.prefill_tokens / 1e6,
            self.decode_row * shape.decode_rows / 1e6,
            self.context_token * shape.context_tokens / 1e6,
            self.prefill_context * shape.prefill_context / 1e6,
        )

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The same in seconds, as `CostModel.from_coefficients` takes them."""
        return tuple(value / 1e6 for value in astuple(self))

    def seconds(self, shape: PlanShape, copy_us: float) -> float:
        """Duration of a step. Copies of blocks run beside its forward and make it longer only when they take longer."""
        forward = sum(self.parts(shape)) if shape.rows else 0.0
        return max(forward, shape.copies * copy_us / 1e6)

    def times(self, factor: float) -> "StepCost":
        """Of a machine on which everything takes so many times as long."""
        return StepCost(*(factor * value for value in astuple(self)))

    def __str__(self) -> str:
        return ",".join(f"{value:.6g}" for value in astuple(self))


class Variation(Struct, frozen=True):
    """What the duration of a step is multiplied with: factors that were measured, equally likely, of steps by class.

    A class is the number of binary digits of a step's prefill tokens, or of its rows when it only decodes. So the
    factors also correct a cost that is not quite linear. Without factors every step takes what it costs.
    """

    prefill: dict[int, _Factors] = {}
    decode: dict[int, _Factors] = {}

    def draw(self, shape: PlanShape, source: random.Random) -> float:
        """Of the step's class, else of the nearest one."""
        factors = self._of(shape)
        return factors[int(source.random() * len(factors))]

    def mean(self, shape: PlanShape) -> float:
        """Of what may be drawn."""
        factors = self._of(shape)
        return sum(factors) / len(factors)

    def times(self, prefill: float, decode: float) -> "Variation":
        """All factors of steps with and without prompt tokens so many times as large."""

        def scaled(classes: dict[int, list[float]], by: float) -> dict[int, list[float]]:
            return {size: [by * factor for factor in factors] for size, factors in (classes or {0: _NONE}).items()}

        return Variation(scaled(self.prefill, prefill), scaled(self.decode, decode))

    def _of(self, shape: PlanShape) -> list[float]:
        classes = self.prefill if shape.prefill_tokens else self.decode
        if not classes:
            return _NONE
        size = (shape.prefill_tokens or shape.rows).bit_length()
        return classes.get(size) or classes[min(classes, key=lambda known: (abs(known - size), known))]


def fit_variation(samples: Sequence[tuple[PlanShape, float]], cost: StepCost) -> Variation:
    """Of (shape, seconds) of measured steps; a class of fewer than 20 also takes from those of about its size."""
    found: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
    for shape, seconds in samples:
        expected = cost.seconds(shape, 0.0)
        if shape.rows and seconds > 0 and expected > 0:
            is_prefill = shape.prefill_tokens > 0
            size = (shape.prefill_tokens or shape.rows).bit_length()
            found[is_prefill].setdefault(size, []).append(seconds / expected)
    return Variation(_thinned(found[True]), _thinned(found[False]))


def _thinned(classes: dict[int, list[float]]) -> dict[int, list[float]]:
    """At most 50 factors a class. One that has fewer than 20 is filled up to that from the nearest classes in turn.

    So its own steps count, however few they are, and yet one odd step is not all that is known of its size.
    """
    found = {}
    for size, factors in sorted(classes.items()):
        filled = list(factors)
        for other in sorted(classes.keys() - {size}, key=lambda known: (abs(known - size), known)):
            if (missing := _FEWEST_OF_A_CLASS - len(filled)) <= 0:
                break
            filled += _spaced(classes[other], missing)
        found[size] = _spaced(filled, _FACTORS)
    return found


def _spaced(factors: Sequence[float], most: int) -> list[float]:
    """In order; of more than `most` so many evenly spaced quantiles."""
    if len(factors) <= most:
        return sorted(factors)
    found: list[float] = np.quantile(factors, (np.arange(most) + 0.5) / most).tolist()
    return found


class Outside(Struct, frozen=True):
    """Microseconds that pass between a client and the scheduler: HTTP, tokenizer, sockets."""

    arrive_us: _Microseconds = 0.0  # from the moment a request is sent until the scheduler has it
    deliver_us: _Microseconds = 0.0  # from the end of a step until the client has its tokens


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
