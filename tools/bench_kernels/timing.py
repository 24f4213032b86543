"""Times of recorded operations."""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle

from kernels.cpu.library import Engine, Op, Step

_RUN_SECONDS = 1e-3  # operations run by one call take about so long: their times then don't include its cost
_LEAST_RUNS = 3


def chunks(ops: list[Op], size: int) -> Iterator[list[Op]]:
    """All of `ops`, in parts of `size`; a remainder is left out, so that all parts take the same time."""
    for start in range(0, len(ops) - size + 1, size):
        yield ops[start : start + size]


def median_seconds(engine: Engine, ops: list[Op], step: Step, seconds: float) -> float:
    """The median time of an operation, in runs of several of them, going through all `ops` again and again.

    Measures for about `seconds`, and at least three runs.
    """

    def timed(part: list[Op]) -> Callable[[], float]:
        recorded = (Op * len(part))(*part)

        def run() -> float:
            start = time.perf_counter()
            engine.run(recorded, step)
            return (time.perf_counter() - start) / len(recorded)

        return run

    first = timed(ops[:1])
    first()  # takes memory for the buffers
    size = min(max(1, round(_RUN_SECONDS / max(first(), 1e-9))), len(ops))
    parts = cycle([timed(part) for part in chunks(ops, size)])
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < _LEAST_RUNS or time.perf_counter() < deadline:
        samples.append(next(parts)())
    return statistics.median(samples)
