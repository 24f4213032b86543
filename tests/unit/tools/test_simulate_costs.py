"""Step costs: read from text, read off a plan, fitted to measurements."""

import random

import pytest

from ipc.codec import pack_ints
from ipc.engine_messages import StepPlan
from scheduler_proc.cost_model import CostModel, StepShape
from tools.simulate.costs import DEFAULT_COST, CostError, PlanShape, StepCost, fit_cost, parse_cost, shape_of


def plan(rows: list[tuple[int, int, int, int]], copies: int = 0) -> StepPlan:
    columns = pack_ints([value for row in rows for value in row])
    return StepPlan(0, (), b"", b"", columns, copies_out=pack_ints([0, 1] * copies))


def test_a_shape_is_read_off_a_plan() -> None:
    assert shape_of(plan([(0, 100, 1, 1), (3, 40, 1, 1)])) == PlanShape(0, 2, 140, 0.0, 2, 2, 0)
    # A chunk of 10 tokens from 20 on attends to 10 * (20 + 5) pairs; the last prompt token alone is a prefill.
    mixed = shape_of(plan([(0, 100, 1, 1), (1, 20, 10, 0), (2, 7, 1, 0), (4, 0, 8, 1)], copies=3))
    assert mixed == PlanShape(19, 1, 100 + 20 + 7, 250.0 + 7.5 + 32.0, 4, 2, 3)
    assert shape_of(plan([], copies=2)) == PlanShape(0, 0, 0, 0.0, 0, 0, 2)


def test_a_step_costs_what_the_core_would_predict() -> None:
    """The order of the five numbers is that of `CostModel`."""
    cost = parse_cost("5000, 300, 250, 0.5, 0.01")
    model = CostModel.from_coefficients([value / 1e6 for value in (5000, 300, 250, 0.5, 0.01)])
    shape = PlanShape(19, 4, 900, 289.5, 6, 5, 0)
    assert cost.seconds(shape, 0.0) == pytest.approx(model.predict(StepShape(19, 289.5, 4, 900)))
    assert sum(cost.parts(shape)) == pytest.approx(cost.seconds(shape, 0.0))


@pytest.mark.parametrize(
    ("prefill", "rows", "milliseconds"),
    [(0, 1, 5.6), (0, 8, 14.5), (0, 32, 45.3), (512, 0, 535), (1000, 0, 1333), (2000, 0, 2951)],
)
def test_the_default_is_what_was_measured(prefill: int, rows: int, milliseconds: float) -> None:
    """docs/measurements.md, "Whole steps in one process": decoding rows have a context of 128."""
    shape = PlanShape(prefill, rows, 128 * rows, prefill * prefill / 2, rows + (prefill > 0), rows, 0)
    assert DEFAULT_COST.seconds(shape, 0.0) * 1e3 == pytest.approx(milliseconds, rel=0.11)


def test_copies_run_beside_the_forward() -> None:
    cost = StepCost(1000.0, 0.0, 0.0, 0.0, 0.0)
    assert cost.seconds(PlanShape(0, 1, 1, 0.0, 1, 1, 5), 100.0) == pytest.approx(1e-3)
    assert cost.seconds(PlanShape(0, 1, 1, 0.0, 1, 1, 50), 100.0) == pytest.approx(5e-3)
    assert cost.seconds(PlanShape(0, 0, 0, 0.0, 0, 0, 5), 100.0) == pytest.approx(5e-4)


@pytest.mark.parametrize(
    "text", ["", "1,2,3,4", "1,2,3,4,5,6", "1,2,x,4,5", "1,2,-3,4,5", "1,2,inf,4,5", "1,2,nan,4,5"]
)
def test_what_is_no_cost_is_said_so(text: str) -> None:
    with pytest.raises(CostError, match="5 numbers of microseconds"):
        parse_cost(text)


def test_a_step_that_costs_nothing_is_refused() -> None:
    with pytest.raises(CostError, match="above 0"):
        parse_cost("0,1,1,1,1")


def random_shapes(count: int) -> list[PlanShape]:
    pick = random.Random(3)
    shapes = []
    for _ in range(count):
        decodes = pick.randint(1, 30)
        tokens = pick.choice((0, 0, pick.randint(1, 500)))
        shapes.append(PlanShape(tokens, decodes, decodes * pick.randint(10, 900), tokens * tokens / 2, 31, 31, 0))
    return shapes


def test_a_fit_finds_the_costs_behind_exact_measurements() -> None:
    truth = StepCost(4000.0, 210.0, 330.0, 0.4, 0.02)
    fit = fit_cost((shape, truth.seconds(shape, 0.0)) for shape in random_shapes(200))
    assert fit.steps == 200
    assert fit.median_error < 1e-9
    assert str(fit.cost) == str(truth)


def test_a_fit_has_no_negative_costs_and_leaves_out_what_never_varied() -> None:
    """Steps that get faster with context (noise, in life): that cost is 0, not negative."""
    shapes = [PlanShape(0, rows, rows * 10 * step, 0.0, rows, rows, 0) for step in range(1, 20) for rows in (1, 8)]
    fit = fit_cost((shape, 0.005 + 0.001 * shape.decode_rows - 1e-7 * shape.context_tokens) for shape in shapes)
    assert fit.cost.context_token == 0.0
    assert fit.cost.prefill_token == fit.cost.prefill_context == 0.0
    assert fit.cost.decode_row > 0
    assert fit.cost.fixed > 0


def test_a_fit_needs_ten_steps() -> None:
    with pytest.raises(CostError, match="9 measured steps; at least 10"):
        fit_cost((shape, 0.01) for shape in random_shapes(9))
