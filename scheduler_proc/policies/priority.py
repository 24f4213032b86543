"""Lowest priority number first, with ageing."""

from scheduler_proc.policies.keyed import KeyedPolicy
from scheduler_proc.request import Request


class AgeingPriority(KeyedPolicy):
    """Key: arrival + priority * priority_age_seconds.

    Waiting for `priority_age_seconds` makes up for one step of priority, so nobody starves: a request is overtaken only
    by requests of a lower priority number that arrive less than (difference of the numbers) * `priority_age_seconds`
    after it. Requests that run are preempted in the same order, the last first.
    """

    def key(self, request: Request) -> float:
        return request.arrival + request.priority * self._config.priority_age_seconds
