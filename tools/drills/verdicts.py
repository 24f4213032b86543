"""What a change gains a metric, and whether an advice was right: the rules that truth is judged by."""

import math
from typing import Protocol

from ipc.stats_messages import MetricName

LEAST = 1.1  # times as good: what gains less is no change worth its name
NOTHING = ""  # advised, or best: no change at all

_ALIKE = 0.9  # of the gain (as a logarithm) of the best change: then another one is as good
_MOST_SLOWER = 1.25  # by which factor throughput may fall for a latency's sake
_MOST_LONGER = 1.25  # by which factor the longest gap may grow for a better mean or p99
_MOST_LATER = 4.0  # by which factor first tokens may come later for steadier streams
_SIBLINGS: dict[MetricName, MetricName] = {
    "ttft": "ttft_p99",
    "ttft_p99": "ttft",
    "itl": "itl_p99",
    "itl_p99": "itl",
}  # one must not lose by more than the other gains


class Measured(Protocol):
    """A run, as its clients saw it."""

    @property
    def metrics(self) -> dict[MetricName, float]:
        """Seconds, and output tokens a second; a p99 only where there was enough for one."""

    @property
    def longest_gap(self) -> float:
        """Seconds between two tokens of a request, at most or nearly so."""


def gain(name: MetricName, before: Measured, after: Measured, doubt: float = 1.0) -> float:
    """How many times as good the metric is; 1 where that costs too much of something else.

    `doubt` is how many times too much something may have been measured.
    """
    was, now = before.metrics, after.metrics
    if name in ("throughput", "concurrency"):
        return now[name] / was[name]
    gained = was[name] / now[name]
    sibling = _SIBLINGS[name]
    if was["throughput"] > doubt * _MOST_SLOWER * now["throughput"]:
        return 1.0
    if sibling in was and sibling in now and now[sibling] > doubt * gained * was[sibling]:
        return 1.0
    if not name.startswith("itl"):
        return gained
    if after.longest_gap > doubt * _MOST_LONGER * before.longest_gap:
        return 1.0
    return 1.0 if now["ttft"] > doubt * min(gained, _MOST_LATER) * was["ttft"] else gained


def is_right(best: str, best_gain: float, advised: str, advised_gain: float) -> bool:
    """Whether the advised change gains what the best one does; both by name, or `NOTHING`."""
    if NOTHING in (best, advised):
        return advised == best
    return math.log(advised_gain) >= _ALIKE * math.log(best_gain)
