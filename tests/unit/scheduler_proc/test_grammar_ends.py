"""Ends that the worker reports: an output that its grammar completes, and a row that cannot go on."""

from typing import Any

import msgspec
import pytest

from ipc.codec import unpack_ints
from ipc.engine_messages import RowFailure, StepPlan, StepResult
from tests.unit.scheduler_proc.engine import Engine
from tests.unit.scheduler_proc.fake_worker import FakeWorker, continuation

PROMPT = [5, 6, 7]


class Reporting(FakeWorker):
    """Reports the row with `PROMPT`, whenever it has sampled so many tokens or more."""

    def __init__(self, outputs: int, **report: Any) -> None:
        super().__init__(64, 4, 8)
        self.outputs, self.report = outputs, report
        self.sampled = 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        columns = unpack_ints(plan.scheduled)
        rows = [row for row, sample in zip(columns[::4], columns[3::4], strict=True) if sample]
        ours = [index for index, row in enumerate(rows) if self.tokens[row][:3] == PROMPT]
        self.sampled += len(ours)
        if not ours or self.sampled < self.outputs:
            return result
        (index,) = ours
        return msgspec.structs.replace(result, **{name: make(index) for name, make in self.report.items()})


def engine_with(outputs: int, **report: Any) -> Engine:
    """Two requests, of which the first is reported; run to the end."""
    engine = Engine()
    engine.worker = Reporting(outputs, **report)
    engine.submit(0, PROMPT, 30, stops=(), min_tokens=20)
    engine.submit(1, [9, 9], 12, stops=())
    while engine.step():
        pass
    assert not engine.core.requests
    assert engine.core.kv.num_private == 0
    assert engine.ends[1] == "length"
    assert engine.outputs[1] == continuation([9, 9], 12, frozenset())
    return engine


@pytest.mark.parametrize("outputs", [1, 2, 7])
def test_a_completed_output_ends_with_its_last_token_whatever_min_tokens_says(outputs: int) -> None:
    engine = engine_with(outputs, completed=lambda index: (index,))
    assert engine.ends[0] == "stop"
    assert engine.outputs[0] == continuation(PROMPT, outputs, frozenset())
    assert engine.core.counters.loop_stops == 0


@pytest.mark.parametrize("outputs", [1, 4])
def test_a_failed_row_ends_its_request_once_without_that_token(outputs: int) -> None:
    engine = engine_with(outputs, failed=lambda index: (RowFailure(index, "grammar: no way on"),))
    failed = engine.failures[0]
    assert (failed.status, failed.message, failed.param) == (400, "grammar: no way on", "grammar")
    assert engine.outputs.get(0, []) == continuation(PROMPT, outputs - 1, frozenset())


def test_the_last_token_allowed_that_also_completes_ends_with_stop() -> None:
    engine = engine_with(30, completed=lambda index: (index,))
    assert engine.ends[0] == "stop"
    assert len(engine.outputs[0]) == 30
