"""First come, first served."""

from scheduler_proc.policies.keyed import KeyedPolicy
from scheduler_proc.request import Request


class FirstComeFirstServed(KeyedPolicy):
    """Nobody is ever overtaken. A preempted request returns to the place it came from, before all later ones."""

    def key(self, request: Request) -> float:
        return 0.0
