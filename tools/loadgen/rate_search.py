"""The highest arrival rate at which enough requests meet the SLO, by doubling or halving and then bisection."""

from collections.abc import Sequence

from msgspec import Struct

TARGETS = (0.9, 0.99)
_FACTOR_LIMIT = 1024  # of the first rate, in both directions


class Probe(Struct, frozen=True):
    """One run at one rate, in requests a second. `share` met the SLO; `void`: the client could not keep up."""

    rate: float
    share: float
    share_low: float
    share_high: float
    goodput: float
    measured: int
    void: bool


class Found(Struct, frozen=True):
    """For one target: the highest rate that met it, and the lowest above which did not. None: there is none.

    The rate that is looked for lies between both; `known_to`: by so much, relative to `rate`.
    """

    target: float
    rate: float | None
    missed_at: float | None
    client_limited: bool  # the next probe above was void, so the server may do more
    known_to: float | None


def passes(probe: Probe, target: float) -> bool:
    return probe.share >= target and not probe.void


def found(probes: Sequence[Probe], target: float) -> Found:
    """What the probes say. A rate that passed above one that failed does not count: the lower bound is safe."""
    failed = [probe for probe in probes if not passes(probe, target)]
    ceiling = min((probe.rate for probe in failed), default=None)
    good = [probe.rate for probe in probes if passes(probe, target) and (ceiling is None or probe.rate < ceiling)]
    limited = any(probe.void for probe in failed if probe.rate == ceiling)
    rate = max(good, default=None)
    return Found(target, rate, ceiling, limited, ceiling / rate - 1 if ceiling is not None and rate else None)


def next_rate(probes: Sequence[Probe], target: float, first: float, precision: float) -> float | None:
    """Where to try next for this target; None when it is known to a factor of 1 + `precision`, or cannot be found."""
    if not probes:
        return first
    state = found(probes, target)
    if state.rate is None:
        assert state.missed_at is not None, "there are probes"
        lower = state.missed_at / 2
        return lower if lower >= first / _FACTOR_LIMIT else None
    if state.missed_at is None:
        higher = state.rate * 2
        return higher if higher <= first * _FACTOR_LIMIT else None
    if state.missed_at / state.rate <= 1 + precision:
        return None
    return (state.rate + state.missed_at) / 2
