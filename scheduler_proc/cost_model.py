"""How long a step will take, learned from the steps that have been.

Pure Python floats and only + - * / and square roots, in a fixed order: an event log gives the same plans, bit for bit,
on any machine. (`sum` is avoided: it rounds differently from Python 3.12 on.)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

MIN_PREFILL = 16  # tokens; a chunk of this size may always be tried, however little has been observed
UNLIMITED = 1 << 30  # rows or tokens, where nothing observed says that they cost anything

_READY_STEPS = 16
_READY_PREFILLS = 2
_FIT_EVERY = 8  # steps
_SCALES = (1.0, 64.0, 8.0, 8192.0, 65536.0)  # typical sizes of the features, which makes them comparable
_FORGET = 0.02  # share of the past that one step makes forgotten: the fit looks back some 50 steps
_FORGET_BIASED = 0.3  # the same, per unit of bias: a model that is always too low (or high) has to learn anew
_ERROR_RATE = 0.05  # of the running means of error and bias
_BIAS_RATE = 0.1
_INERTIA = (1e-4, 0.03)  # weight of the previous coefficients, as a share of all steps': at first, and in the end
_INERT_AFTER = 200  # steps with prefill tokens, from which the coefficients come
_MARGIN = 1.5  # typical relative errors that a limit is lowered by: about nine steps in ten then keep it
_SHORTEST = 1e-6  # seconds; relative errors of shorter steps mean nothing


class StepShape(NamedTuple):
    """What a step computes."""

    prefill_tokens: int = 0
    prefill_context: float = 0.0  # attended pairs: over all chunks, count * (start + count / 2)
    decode_rows: int = 0
    context_tokens: int = 0  # read by attention: the context of each decode row, and what is before each chunk

    def with_chunk(self, start: int, count: int) -> "StepShape":
        """The same step with one more prefill chunk: `count` tokens from position `start` on."""
        return self._replace(
            prefill_tokens=self.prefill_tokens + count,
            prefill_context=self.prefill_context + count * (start + count / 2),
            context_tokens=self.context_tokens + start,
        )


class CostModel:
    """Step time = a + b * prefill_tokens + c * decode_rows + d * context_tokens + e * prefill_context, all from 0 up.

    Least squares of the *relative* error with exponential forgetting. In directions in which recent steps do not differ
    (nothing but decoding, always the same batch) the coefficients stay as they were. A step far from its prediction
    counts as one at the edge of what is usual, so that a hiccup of the machine does little; but when errors go on in
    one direction the edge widens and the past is forgotten faster, so that a real change is followed within some 50
    steps.
    """

    def __init__(self) -> None:
        self._theta = [0.0] * 5  # coefficients of the scaled features, seconds
        self._normal = [[0.0] * 5 for _ in range(5)]  # weighted sums of feature products; the lower triangle
        self._moment = [0.0] * 5  # weighted sums of feature times seconds
        self._steps = 0
        self._prefills = 0
        self._largest_prefill = 0
        self._error = 0.1  # running mean of the relative error, each counted as 1 at most
        self._bias = 0.0  # the same, signed
        self._ready = False

    @classmethod
    def from_coefficients(cls, coefficients: Sequence[float]) -> "CostModel":
        """A model that is ready, exact and unbounded: (a, b, c, d, e) in seconds per unit of each feature."""
        if len(coefficients) != 5 or not all(0 <= value < math.inf for value in coefficients):
            raise ValueError(f"coefficients must be 5 finite numbers from 0 up, not {list(coefficients)}")
        model = cls()
        model._theta = [value * scale for value, scale in zip(coefficients, _SCALES, strict=True)]
        model._largest_prefill = UNLIMITED
        model._error = 0.0
        model._ready = True
        return model

    @property
    def ready(self) -> bool:
        """Whether predictions can be trusted: fitted to at least 16 steps, 2 of them with prefill tokens."""
        return self._ready

    @property
    def coefficients(self) -> tuple[float, ...]:
        """(a, b, c, d, e): seconds a step, a prefill token, a decode row, a token of context, a prefill pair."""
        return tuple(value / scale for value, scale in zip(self._theta, _SCALES, strict=True))

    @property
    def relative_error(self) -> float:
        """Typical |measured / predicted - 1|, of the last 20 steps or so."""
        return self._error

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape will take."""
        step, prefill_token, decode_row, context_token, prefill_context = self._theta
        return (
            step
            + prefill_token * (shape.prefill_tokens / _SCALES[1])
            + decode_row * (shape.decode_rows / _SCALES[2])
            + context_token * (shape.context_tokens / _SCALES[3])
            + prefill_context * (shape.prefill_context / _SCALES[4])
        )

    # --- learning ---

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be finite and from 0 up, not {seconds}")
        expected = self.predict(shape)
        if self._ready:
            seconds = self._clip(max(expected, _SHORTEST), seconds)
        else:
            expected = seconds
        self._steps += 1
        if shape.prefill_tokens:
            self._prefills += 1
        expected = max(expected, _SHORTEST)
        self._accumulate(shape, seconds, 1 / (expected * expected))
        # A first look at a larger chunk is learned from at once, since it allows one of twice the size.
        if self._steps % _FIT_EVERY == 0 or shape.prefill_tokens > self._largest_prefill:
            self._largest_prefill = max(self._largest_prefill, shape.prefill_tokens)
            self._fit()

    def _clip(self, expected: float, seconds: float) -> float:
        """Take the error of a prediction into the running means; the step time limited to what is usual."""
        edge = 1 + min(3.0, max(0.25, 3 * self._error))
        error = min(1.0, max(-1.0, seconds / expected - 1))
        self._error += _ERROR_RATE * (abs(error) - self._error)
        self._bias += _BIAS_RATE * (error - self._bias)
        return min(expected * edge, max(expected / edge, seconds))

    def _accumulate(self, shape: StepShape, seconds: float, weight: float) -> None:
        features = (
            1.0,
            shape.prefill_tokens / _SCALES[1],
            shape.decode_rows / _SCALES[2],
            shape.context_tokens / _SCALES[3],
            shape.prefill_context / _SCALES[4],
        )
        keep = 1 - min(0.2, _FORGET + _FORGET_BIASED * abs(self._bias))
        for index, feature in enumerate(features):
            scaled = weight * feature
            row = self._normal[index]
            for other in range(index + 1):
                row[other] = keep * row[other] + scaled * features[other]
            self._moment[index] = keep * self._moment[index] + scaled * seconds

    def _fit(self) -> None:
        """Solve for the coefficients; while one is negative, without the most negative one."""
        active = list(range(5))
        least, most = _INERTIA
        inertia = max(least, most * min(1.0, self._prefills / _INERT_AFTER)) * self._normal[0][0]
        while True:
            matrix = [[self._normal[row][column] for column in active[: index + 1]] for index, row in enumerate(active)]
            for index in range(len(active)):
                matrix[index][index] += inertia
            values = [self._moment[index] + inertia * self._theta[index] for index in active]
            solution = _solve(matrix, values)
            lowest = min(range(len(active)), key=solution.__getitem__)
            if solution[lowest] >= 0 or len(active) == 1:
                break
            del active[lowest]
        self._theta = [0.0] * 5
        for index, value in zip(active, solution, strict=True):
            self._theta[index] = max(0.0, value)
        self._ready = self._ready or (self._steps >= _READY_STEPS and self._prefills >= _READY_PREFILLS)

    # --- planning ---

    def max_prefill_tokens(self, limit_seconds: float, decodes: StepShape, start: int, most: int) -> int:
        """Largest prefill chunk that a step has time for beside `decodes`: 0 to `most` tokens from position `start` on.

        `decodes` may have chunks already. 0 when that step misses the limit without any chunk. The limit is lowered by
        1.5 times the typical relative error; and the step gets at most twice as many prefill tokens as any observed
        before (or MIN_PREFILL), since beyond that the model only guesses.
        """
        trusted = max(MIN_PREFILL, 2 * self._largest_prefill) - decodes.prefill_tokens
        return self.affordable_prefill_tokens(limit_seconds, decodes, start, min(most, trusted))

    def affordable_prefill_tokens(self, limit_seconds: float, decodes: StepShape, start: int, most: int) -> int:
        """As `max_prefill_tokens`, without the bound on what was never observed."""
        limit = self._with_margin(limit_seconds)
        _, token, _, context, pair = self.coefficients
        spare = limit - self.predict(decodes) - context * start
        if spare < 0 or most <= 0:
            return 0
        # Largest root of pair / 2 * n^2 + (token + pair * start) * n = spare, in the form that does not cancel.
        linear = token + pair * start
        divisor = linear + math.sqrt(linear * linear + 2 * pair * spare)
        count = most if divisor * most <= 2 * spare else int(2 * spare / divisor)
        if count and self.predict(decodes.with_chunk(start, count)) > limit:
            count -= 1  # the root was rounded up
        return count

    def max_decode_rows(self, limit_seconds: float, context_per_row: float) -> int:
        """Most decode rows with so many tokens of context each that a step has time for, with the same margin.

        UNLIMITED while rows seem to cost nothing.
        """
        spare = self._with_margin(limit_seconds) - self._theta[0]
        _, _, row, context, _ = self.coefficients
        per_row = row + context * context_per_row
        if spare < 0:
            return 0
        return int(spare / per_row) if per_row * UNLIMITED > spare else UNLIMITED

    def _with_margin(self, limit_seconds: float) -> float:
        return limit_seconds / (1 + _MARGIN * self._error)


def _solve(matrix: list[list[float]], values: list[float]) -> list[float]:
    """Solve a symmetric positive definite system, given as its lower triangle, by LDL^T; overwrites both arguments."""
    size = len(values)
    for column in range(size):
        pivot = matrix[column][column]
        for row in range(column + 1, size):
            factor = matrix[row][column] / pivot
            for other in range(column + 1, row + 1):
                matrix[row][other] -= factor * matrix[other][column]
            values[row] -= factor * values[column]
    for row in range(size - 1, -1, -1):
        value = values[row]
        for other in range(row + 1, size):
            value -= matrix[other][row] * values[other]
        values[row] = value / matrix[row][row]
    return values
