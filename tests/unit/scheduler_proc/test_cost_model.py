"""The cost model against synthetic engines whose step time is known."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_proc.cost_model import MIN_PREFILL, UNLIMITED, CostModel, StepShape

# A small model on a CPU: seconds a step, a prefill token, a decode row, a token of context, a prefill pair.
ENGINE = (4e-3, 2e-4, 5e-4, 4e-7, 2e-8)


def true_seconds(shape: StepShape) -> float:
    step, token, row, context, pair = ENGINE
    prefill = token * shape.prefill_tokens + pair * shape.prefill_context
    return step + prefill + row * shape.decode_rows + context * shape.context_tokens


def mixed_step(rng: random.Random) -> StepShape:
    rows = rng.randrange(33)
    decodes = StepShape(decode_rows=rows, context_tokens=rows * rng.randrange(50, 3000))
    if rows and rng.random() < 0.5:
        return decodes
    return decodes.with_chunk(rng.randrange(3000), rng.randrange(1, 300))


def decode_step(rng: random.Random) -> StepShape:
    return StepShape(decode_rows=8, context_tokens=8 * rng.randrange(500, 1000))


def teach(
    model: CostModel,
    rng: random.Random,
    steps: int,
    *,
    shapes: Callable[[random.Random], StepShape] = mixed_step,
    speed: float = 1.0,
    noise: float = 0.05,
) -> None:
    for _ in range(steps):
        shape = shapes(rng)
        model.observe(shape, true_seconds(shape) / speed * max(0.5, rng.gauss(1, noise)))


def worst_error(model: CostModel, rng: random.Random, *, speed: float = 1.0) -> float:
    """Largest relative error of 200 predictions, against step times without noise."""
    shapes = [mixed_step(rng) for _ in range(200)]
    return max(abs(model.predict(shape) / (true_seconds(shape) / speed) - 1) for shape in shapes)


@pytest.mark.parametrize("seed", range(5))
class TestLearning:
    def test_exact_steps_give_exact_coefficients(self, seed: int) -> None:
        model = CostModel()
        teach(model, random.Random(seed), 400, noise=0.0)
        assert model.ready
        assert model.coefficients == pytest.approx(ENGINE, rel=1e-3)

    def test_noise_is_averaged_out(self, seed: int) -> None:
        rng = random.Random(seed)
        model = CostModel()
        teach(model, rng, 300)
        assert worst_error(model, rng) < 0.15
        assert 0.02 < model.relative_error < 0.1

    def test_a_hiccup_does_not_wreck_the_fit(self, seed: int) -> None:
        rng = random.Random(seed)
        model = CostModel()
        teach(model, rng, 300, noise=0.02)
        for _ in range(3):
            shape = mixed_step(rng)
            model.observe(shape, 10 * true_seconds(shape))
            teach(model, rng, 15, noise=0.02)
            assert worst_error(model, rng) < 0.15

    @pytest.mark.parametrize("speed", [0.5, 2.0, 4.0])
    def test_a_change_of_speed_is_followed_within_50_steps(self, seed: int, speed: float) -> None:
        rng = random.Random(seed)
        model = CostModel()
        teach(model, rng, 300)
        teach(model, rng, 50, speed=speed)
        assert worst_error(model, rng, speed=speed) < 0.3
        teach(model, rng, 100, speed=speed)
        assert worst_error(model, rng, speed=speed) < 0.15

    def test_what_prefill_costs_is_not_forgotten_while_only_decoding(self, seed: int) -> None:
        rng = random.Random(seed)
        model = CostModel()
        teach(model, rng, 300, noise=0.02)
        teach(model, rng, 5000, shapes=decode_step, noise=0.02)
        assert worst_error(model, rng) < 0.2

    def test_the_end_of_a_long_prompt_does_not_make_the_tokens_of_the_next_look_free(self, seed: int) -> None:
        # Far into a prompt, tokens and attended pairs grow together: a few steps can't tell their costs apart.
        for rng in map(random.Random, range(10 * seed, 10 * seed + 10)):
            model = CostModel()
            teach(model, rng, 300)
            start = 0
            while start < 8000:
                count = rng.randrange(6, 13)
                shape = decode_step(rng).with_chunk(start, count)
                model.observe(shape, true_seconds(shape) * max(0.5, rng.gauss(1, 0.15)))
                start += count
            teach(model, rng, 30, shapes=decode_step, noise=0.15)
            first = decode_step(rng).with_chunk(0, 80)
            assert model.predict(first) > 0.6 * true_seconds(first)

    def test_decoding_alone_makes_no_one_trust_it_and_prefill_is_learned_quickly(self, seed: int) -> None:
        rng = random.Random(seed)
        model = CostModel()
        teach(model, rng, 500, shapes=decode_step, noise=0.02)
        assert not model.ready
        limit = 0.06
        chunks = []
        for _ in range(12):
            decodes = decode_step(rng)
            count = model.max_prefill_tokens(limit, decodes, 0, 1000)
            chunks.append(count)
            shape = decodes.with_chunk(0, count)
            # Growing step by step towards the limit, no step overshoots it by much.
            assert true_seconds(shape) < 1.3 * limit
            model.observe(shape, true_seconds(shape) * rng.gauss(1, 0.02))
        assert chunks[:3] == [MIN_PREFILL, 2 * MIN_PREFILL, 4 * MIN_PREFILL]
        assert true_seconds(shape) > 0.6 * limit
        assert model.ready


def test_ready_takes_16_steps_of_which_2_with_prefill() -> None:
    prefill, decode = StepShape(64, 2048.0), StepShape(0, 0.0, 4, 400)
    model = CostModel()
    for step in range(40):
        model.observe(prefill if step == 0 else decode, 0.01)
    assert not model.ready
    for _ in range(8):
        model.observe(prefill, 0.02)
    assert model.ready

    early = CostModel()
    for _ in range(15):
        early.observe(prefill, 0.02)
        assert not early.ready
    early.observe(prefill, 0.02)
    assert early.ready


steps = st.builds(
    StepShape,
    prefill_tokens=st.integers(0, 1 << 20),
    prefill_context=st.floats(0, 1e12),
    decode_rows=st.integers(0, 4096),
    context_tokens=st.integers(0, 1 << 30),
)
durations = st.floats(0, 1e4)


@st.composite
def taught_models(draw: st.DrawFn) -> CostModel:
    """Models that have seen anything, however absurd."""
    model = CostModel()
    pool = draw(st.lists(st.tuples(steps, durations), max_size=12))
    for shape, seconds in pool * draw(st.integers(1, 5)):
        model.observe(shape, seconds)
    return model


class TestWhateverWasObserved:
    @given(taught_models(), steps, steps)
    @settings(max_examples=200)
    def test_predictions_are_finite_and_grow_with_every_feature(
        self, model: CostModel, shape: StepShape, more: StepShape
    ) -> None:
        assert all(0 <= value < math.inf for value in model.coefficients)
        base = model.predict(shape)
        assert 0 <= base < math.inf
        for field in StepShape._fields:
            larger = shape._replace(**{field: getattr(shape, field) + getattr(more, field)})
            assert model.predict(larger) >= base

    @given(taught_models(), steps, st.floats(1e-6, 10), st.integers(0, 1 << 16), st.integers(0, 1 << 20))
    @settings(max_examples=200)
    def test_chunks_keep_the_limit_and_are_the_largest_that_do(
        self, model: CostModel, decodes: StepShape, limit: float, start: int, most: int
    ) -> None:
        count = model.affordable_prefill_tokens(limit, decodes, start, most)
        assert 0 <= count <= most
        margin = limit / (1 + 1.5 * model.relative_error)
        if count:
            assert model.predict(decodes.with_chunk(start, count)) <= margin
        if count < most:
            assert model.predict(decodes.with_chunk(start, count + 2)) > margin * (1 - 1e-9)
        assert model.max_prefill_tokens(limit, decodes, start, most) <= count

    @given(taught_models(), st.floats(1e-6, 10), st.floats(0, 1 << 20))
    def test_decode_rows_keep_the_limit_and_are_the_most_that_do(
        self, model: CostModel, limit: float, context: float
    ) -> None:
        margin = limit / (1 + 1.5 * model.relative_error)
        rows = model.max_decode_rows(limit, context)
        step, _, per_row, per_token, _ = model.coefficients
        if rows:
            assert step + rows * (per_row + per_token * context) <= margin * (1 + 1e-9)
        if rows < UNLIMITED:
            assert step + (rows + 1) * (per_row + per_token * context) > margin * (1 - 1e-9)


class TestGivenCoefficients:
    def test_predicts_the_sum(self) -> None:
        model = CostModel.from_coefficients((0.5, 0.25, 0.125, 0.0625, 0.03125))
        assert model.ready
        assert model.relative_error == 0
        assert model.predict(StepShape(2, 4.0, 8, 16)) == 0.5 + 0.5 + 1.0 + 1.0 + 0.125

    def test_chunk_sizes_by_hand(self) -> None:
        linear = CostModel.from_coefficients((0.25, 0.125, 0.5, 0.0, 0.0))
        assert linear.max_prefill_tokens(2.0, StepShape(decode_rows=1), 100, 1000) == 10
        assert linear.max_prefill_tokens(2.0, StepShape(decode_rows=1), 100, 7) == 7
        assert linear.max_prefill_tokens(2.0, StepShape(decode_rows=4), 0, 1000) == 0
        assert linear.max_prefill_tokens(0.5, StepShape(), 0, 1000) == 2
        # 1/32 * n * (3 + n/2) + 1/16 * n = 2 has its root at 7.37; behind another chunk it is 3.49.
        attending = CostModel.from_coefficients((0.0, 0.0625, 0.0, 0.0, 0.03125))
        assert attending.max_prefill_tokens(2.0, StepShape(), 3, 1000) == 7
        behind = StepShape().with_chunk(10, 3)
        assert attending.predict(behind) == 3 * 0.0625 + 34.5 * 0.03125
        assert attending.max_prefill_tokens(2.0, behind, 3, 1000) == 3

    def test_decode_rows_by_hand(self) -> None:
        model = CostModel.from_coefficients((0.25, 9.0, 0.125, 0.0625, 9.0))
        assert model.max_decode_rows(2.0, 2.0) == 7
        assert model.max_decode_rows(0.125, 2.0) == 0
        assert CostModel.from_coefficients((0.25, 1.0, 0.0, 0.0, 0.0)).max_decode_rows(2.0, 2.0) == UNLIMITED

    @pytest.mark.parametrize(
        "bad", [(1.0,), (0.0, 0.0, -1.0, 0.0, 0.0), (math.nan, 0, 0, 0, 0), (math.inf, 0, 0, 0, 0)]
    )
    def test_bad_coefficients_are_refused(self, bad: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="coefficients"):
            CostModel.from_coefficients(bad)

    @pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
    def test_bad_durations_are_refused(self, seconds: float) -> None:
        with pytest.raises(ValueError, match="seconds"):
            CostModel().observe(StepShape(1), seconds)


def test_a_step_gets_at_most_twice_the_largest_prefill_observed() -> None:
    model = CostModel()
    for _ in range(16):
        model.observe(StepShape(100, 5000.0), 0.01)
    assert model.max_prefill_tokens(1e3, StepShape(), 0, 1000) == 200
    assert model.max_prefill_tokens(1e3, StepShape(prefill_tokens=150), 0, 1000) == 50
    assert model.max_prefill_tokens(1e3, StepShape(prefill_tokens=300), 0, 1000) == 0
    assert model.affordable_prefill_tokens(1e3, StepShape(), 0, 1000) == 1000
