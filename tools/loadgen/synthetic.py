"""Arrivals and lengths that no trace says: processes and distributions, in the short form of the command line."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.reports.percentiles import Floats

ARRIVALS_HELP = "trace | poisson:RATE | gamma:RATE,CV | fixed:RATE | closed:USERS[,THINK_SECONDS]"
LENGTHS_HELP = "N | uniform:LOW,HIGH | normal:MEAN,SD | lognormal:MEDIAN,SIGMA | exponential:MEAN"
_MOST_TOKENS = 1 << 20
_MOST_USERS = 100_000


class SpecError(Exception):
    """A description that cannot be used; the text is one line for the user, without the flag's name."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come. `rate` in requests a second; `users` is 0 in an open loop; `think` in seconds."""

    kind: str
    rate: float = 0.0
    cv: float = 1.0  # coefficient of variation of the time between two
    users: int = 0
    think: float = 0.0

    def gaps(self, rng: np.random.Generator, count: int) -> list[float]:
        """Seconds between arrivals, each independent of the others."""
        if self.kind == "fixed":
            return [1 / self.rate] * count
        shape = 1 / self.cv**2  # 1: exponential gaps, which are a Poisson process
        found: list[float] = rng.gamma(shape, 1 / (self.rate * shape), count).tolist()
        return found

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        """Moments of so many arrivals, the first at 0."""
        return np.cumsum([0.0, *self.gaps(rng, count - 1)]).tolist() if count else []


TRACE_ARRIVALS = Arrivals("trace")


def parse_arrivals(text: str) -> Arrivals:
    """Of `ARRIVALS_HELP`; raises `SpecError`."""
    kind, numbers = _parts(text)
    match kind, numbers:
        case "trace", []:
            return TRACE_ARRIVALS
        case (("poisson" | "fixed"), [rate]) if rate > 0:
            return Arrivals(kind, rate)
        case "gamma", [rate, cv] if rate > 0 and 0.01 <= cv <= 100:
            return Arrivals(kind, rate, cv)
        case "closed", [users, *think] if users.is_integer() and 1 <= users <= _MOST_USERS and len(think) <= 1:
            if not think or think[0] >= 0:
                return Arrivals(kind, users=int(users), think=think[0] if think else 0.0)
    raise SpecError(
        f"must be {ARRIVALS_HELP}, with a rate above 0, a CV from 0.01 to 100 and at most {_MOST_USERS} users; "
        f"not {text!r}"
    )


Lengths = Callable[[np.random.Generator, int], list[int]]


def parse_lengths(text: str) -> Lengths:
    """Of `LENGTHS_HELP`, as a function that draws so many lengths, each from 1 to 2^20; raises `SpecError`."""
    kind, numbers = _parts(text if ":" in text else f"fixed:{text}")
    match kind, numbers:
        case "fixed", [length] if length.is_integer() and 1 <= length <= _MOST_TOKENS:
            return lambda rng, count: [int(length)] * count
        case "uniform", [low, high] if low.is_integer() and high.is_integer() and 1 <= low <= high <= _MOST_TOKENS:
            return lambda rng, count: rng.integers(int(low), int(high), count, endpoint=True).tolist()
        case "normal", [mean, deviation] if mean >= 1 and deviation >= 0:
            return _rounded(lambda rng, count: rng.normal(mean, deviation, count))
        case "lognormal", [median, sigma] if median >= 1 and 0 <= sigma <= 10:
            return _rounded(lambda rng, count: rng.lognormal(math.log(median), sigma, count))
        case "exponential", [mean] if mean >= 1:
            return _rounded(lambda rng, count: rng.exponential(mean, count))
    raise SpecError(f"must be {LENGTHS_HELP}, from 1 to {_MOST_TOKENS} tokens; not {text!r}")


def _rounded(draw: Callable[[np.random.Generator, int], Floats]) -> Lengths:
    return lambda rng, count: np.clip(draw(rng, count).round(), 1, _MOST_TOKENS).astype(int).tolist()


def _parts(text: str) -> tuple[str, list[float]]:
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        return "", []
    return (kind, numbers) if all(map(math.isfinite, numbers)) else ("", [])
