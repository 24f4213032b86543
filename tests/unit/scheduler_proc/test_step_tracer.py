"""What a trace is told of plans and results, against the plans themselves."""

from ipc.codec import unpack_ints
from ipc.trace_messages import TracedPlanning, TracedStep
from ipc.tracing import TraceItem, Tracer
from scheduler_proc.step_tracer import StepTracer
from tests.unit.scheduler_proc.engine import Engine


class Notes(Tracer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("scheduler-0", "")
        self.items: list[TraceItem] = []

    def add(self, item: TraceItem) -> None:
        self.items.append(item)


def test_each_plan_and_each_result_while_it_is_wanted() -> None:
    engine, tracer = Engine(max_step_tokens=8), Notes()
    traced = StepTracer(engine.core, engine.core.handle, tracer)
    engine.core.handle = traced.handle  # type: ignore[method-assign]
    engine.submit(1, [1, 2, 3], 9, stops=())
    engine.step()
    assert tracer.items == []
    tracer.wanted = True
    before = len(engine.sent)
    engine.submit(2, list(range(1, 30)), 9, stops=())
    engine.run_to_idle()
    planned = [step for item in tracer.items if isinstance(item, TracedPlanning) for step in item.steps]
    sent = engine.sent[before:]
    assert [step.step for step in planned] == [plan.step for plan in sent]
    for step, plan in zip(planned, sent, strict=True):
        columns = unpack_ints(plan.scheduled)
        assert step.tokens == sum(columns[2::4])
        assert step.prefill_rows + step.decode_rows == len(columns) // 4
    assert any(step.prefill_rows == step.decode_rows == 1 for step in planned)
    assert all(item.start <= item.end for item in tracer.items if isinstance(item, TracedPlanning))
    results = [item for item in tracer.items if isinstance(item, TracedStep)]
    assert [result.step for result in results] == [plan.step for plan in engine.sent[1:]]
    assert all(result.forward_us == 10_000 for result in results)
