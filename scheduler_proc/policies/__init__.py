"""Scheduling policies by name. Each is imported when it is first asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

from config.schema import PolicyName, SchedulerConfig
from scheduler_proc.policies.base import Policy
from scheduler_proc.request import Request

_CLASSES: dict[PolicyName, tuple[str, str]] = {
    "fcfs": ("fcfs", "FirstComeFirstServed"),
    "priority": ("priority", "AgeingPriority"),
    "longest-prefix": ("longest_prefix", "LongestPrefixFirst"),
    "fair": ("fair", "DeficitRoundRobin"),
    "deadline": ("deadline", "EarliestDeadlineFirst"),
}


def make_policy(config: SchedulerConfig, cached_tokens: Callable[[Request], int]) -> Policy:
    """The policy that `config.policy` names. `cached_tokens`: see `Policy`."""
    module, name = _CLASSES[config.policy]
    return cast(Policy, getattr(import_module(f"{__name__}.{module}"), name)(config, cached_tokens))
