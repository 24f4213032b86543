"""Stands before the core and tells of its plans and of their results, while somebody takes a trace."""

import time
from collections.abc import Callable

from ipc.trace_messages import PlannedStep, TracedPlanning, TracedStep
from ipc.tracing import Tracer
from scheduler_proc.core import SchedulerCore
from scheduler_proc.events import Command, Event, SendPlan, StepDone


class StepTracer:
    def __init__(self, core: SchedulerCore, handle: Callable[[Event], list[Command]], tracer: Tracer) -> None:
        """`handle`: the core's, perhaps with a recorder before it."""
        self._core = core
        self._handle = handle
        self._tracer = tracer

    def handle(self, event: Event) -> list[Command]:
        """What `handle` does, and how long it took."""
        if not self._tracer.wanted:
            return self._handle(event)
        start = time.monotonic()
        commands = self._handle(event)
        end = time.monotonic()
        if isinstance(event, StepDone):
            result = event.result
            parts = (result.prepare_us, result.forward_us, result.sample_us, result.score_us)
            self._tracer.add(TracedStep(result.step, event.time, *parts))
        sent = {command.plan.step for command in commands if isinstance(command, SendPlan)}
        if sent:
            planned = tuple(
                PlannedStep(step.number, len(step.decodes) + step.prefill_tokens, len(step.prefills), len(step.decodes))
                for step in self._core.in_flight
                if step.number in sent
            )
            self._tracer.add(TracedPlanning(start, end, planned))
        return commands
