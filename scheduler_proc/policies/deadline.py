"""Earliest deadline of the first token first."""

from scheduler_proc.policies.keyed import KeyedPolicy
from scheduler_proc.request import Request


class EarliestDeadlineFirst(KeyedPolicy):
    """Key: arrival + TTFT target; a request without a target counts as one with `priority_age_seconds`.

    A request is overtaken only by those that arrive less than (difference of the targets) after it.
    """

    def key(self, request: Request) -> float:
        target = self._config.priority_age_seconds if request.ttft_target is None else request.ttft_target
        return request.arrival + target
