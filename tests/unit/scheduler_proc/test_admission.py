"""Predicted TTFT: by hand, and more ahead never means earlier."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.codec import unpack_ints
from scheduler_proc.admission import Outages, TtftPredictor, retry_after
from scheduler_proc.cost_model import CostModel
from tests.unit.scheduler_proc.engine import Engine

# A step takes 0.5 s, a prefill token 1/64 s, a decode row 1/8 s; context is free.
SIMPLE = (0.5, 1 / 64, 1 / 8, 0.0, 0.0)


def make(
    coefficients: tuple[float, ...] = SIMPLE, max_step_tokens: int = 64, max_itl: float | None = None
) -> TtftPredictor:
    return TtftPredictor(CostModel.from_coefficients(coefficients), max_step_tokens, max_itl)


def predict(predictor: TtftPredictor, own: int = 64, **changes: int) -> float:
    values = {"tokens_ahead": 0, "requests_ahead": 0, "running": 0, "free_rows": 8, "decode_context": 0}
    return predictor.predict(own_tokens=own, **(values | changes))


class TestByHand:
    def test_an_idle_engine_computes_the_prompt(self) -> None:
        assert predict(make()) == 0.5 + 1.0
        assert predict(make(), own=65) == 2 * 0.5 + 65 / 64

    def test_what_is_ahead_is_computed_first(self) -> None:
        assert predict(make(), tokens_ahead=128, requests_ahead=2) == 3 * (0.5 + 1.0)

    def test_running_streams_take_part_of_each_step(self) -> None:
        # 60 tokens of prompt a step beside 4 decoding rows: 64 need two steps of 0.5 + 4/8 s.
        assert predict(make(), running=4) == 2 * 1.0 + 1.0

    def test_the_itl_limit_makes_chunks_smaller(self) -> None:
        # 1.25 s a step, of which 0.75 are taken with 2 rows: 32 tokens of prompt in each.
        assert predict(make(max_itl=1.25), running=2) == 2 * 0.75 + 1.0
        assert predict(make(max_itl=1.25), running=0) == 1.5  # nobody streams, nobody stalls
        # No time for any: the planner still gives the prompt a few tokens in each step.
        assert predict(make(max_itl=0.25), running=2) == 4 * 0.75 + 1.0

    def test_attention_grows_with_the_prompt(self) -> None:
        # 32 * 16 pairs for the own prompt of 32, and as many for each 32 tokens ahead.
        attending = make((0.5, 0.0, 0.0, 0.0, 1 / 1024), max_step_tokens=1000)
        assert predict(attending, own=32) == 0.5 + 0.5
        assert predict(attending, own=32, tokens_ahead=64, requests_ahead=2) == 0.5 + 1.5

    def test_without_a_free_row_it_waits_for_requests_to_end(self) -> None:
        predictor = make()
        predictor.observe_finish(30.0, 10)
        predictor.observe_finish(50.0, 10)  # 40 s on average
        # 8 running, one ends every 5 s; the third to end makes room for the third in line.
        prefill = 2 * (0.5 + 1.0) + 1.0
        assert predict(predictor, running=8, free_rows=0, requests_ahead=2) == 15.0 + prefill
        # One row is free and one request ahead takes it.
        assert predict(predictor, running=7, free_rows=1, requests_ahead=1) == 5.0 + 2 * (0.5 + 7 / 8) + 1.0
        assert predict(predictor, running=7, free_rows=1, requests_ahead=0) == 2 * (0.5 + 7 / 8) + 1.0

    def test_waiting_for_a_row_and_computing_what_is_ahead_overlap(self) -> None:
        predictor = make((0.0, 1.0, 0.0, 0.0, 0.0), max_step_tokens=1000)
        predictor.observe_finish(40.0, 0)
        assert predict(predictor, own=1, tokens_ahead=5, requests_ahead=1, running=4, free_rows=1) == 8.0 + 1.0
        assert predict(predictor, own=1, tokens_ahead=50, requests_ahead=1, running=4, free_rows=1) == 51.0

    def test_requests_stay_longer_when_steps_got_slower(self) -> None:
        predictor = make()
        predictor.observe_finish(8.0, 16)  # half a second a token, alone
        # With 12 rows a step takes 2 s now: 16 tokens take 32 s.
        assert predict(predictor, own=1, running=12, free_rows=0) == 32 / 12 + (2.0 + 1 / 64)

    def test_what_nothing_can_start_before_comes_on_top(self) -> None:
        assert predict(make(), delay=4) == 4.0 + 0.5 + 1.0

    def test_nobody_is_refused_on_ignorance(self) -> None:
        predictor = TtftPredictor(CostModel(), 64, None)
        assert predict(predictor, own=10**6, tokens_ahead=10**9, requests_ahead=10**6, free_rows=-5) == 0


def test_stays_are_averaged_over_some_32_requests() -> None:
    predictor = make((0.0, 0.0, 0.0, 0.0, 0.0))
    for _ in range(500):
        predictor.observe_finish(10.0, 1)
    for _ in range(32):
        predictor.observe_finish(20.0, 1)
    stay = predict(predictor, running=1, free_rows=0)
    assert stay == pytest.approx(20 - 10 * (1 - 1 / 32) ** 32)


@pytest.mark.parametrize(
    ("predicted", "seconds"), [(1.01, 1), (1.0, 1), (2.0, 1), (2.5, 2), (11.0, 10), (11.01, 11), (900.0, 60)]
)
def test_retry_after_is_the_excess_in_whole_seconds(predicted: float, seconds: int) -> None:
    assert retry_after(predicted, 1.0) == seconds


def test_an_outage_is_expected_to_take_as_long_as_the_one_before() -> None:
    outages = Outages()
    assert outages.left(0.0) == 0
    outages.begin(1.0)  # the start
    assert outages.left(2.0) == 0, "nothing is known yet"
    outages.end(9.0)
    assert outages.left(10.0) == 0, "there is none"
    outages.begin(20.0)
    outages.begin(21.0)
    assert outages.left(22.0) == 6.0
    assert outages.left(40.0) == 0
    outages.end(50.0)
    outages.begin(60.0)
    assert outages.left(60.0) == 30.0


class TestOfTheCore:
    """Steps take 0.5 s and 1/64 s for each prompt token, as the model knows; a request of 64 tokens alone 1.5 s."""

    def engine(self, **settings: Any) -> Engine:
        cost_model = CostModel.from_coefficients((0.5, 1 / 64, 0.0, 0.0, 0.0))
        engine = Engine(num_blocks=400, max_seqs=4, max_step_tokens=64, cost_model=cost_model, **settings)
        engine.seconds = lambda plan: 0.5 + sum(unpack_ints(plan.scheduled)[2::4]) / 64
        return engine

    def refused(self, engine: Engine, target: float) -> bool:
        number = len(engine.submitted)
        engine.submit(number, [number % 40 + 1] * 64, 1, stops=(), ttft_target_ms=target * 1e3)
        return number in engine.failures

    def test_waiting_for_a_batch_counts(self) -> None:
        engine = self.engine(batch_wait_ms=2000.0)
        assert self.refused(engine, 3.4)
        assert not self.refused(engine, 3.6)
        engine.time += 1.5  # it is the first one's wait that counts
        assert self.refused(engine, 0.4 + 3.0)
        assert not self.refused(engine, 0.6 + 3.0)
        engine.run_to_idle()

    def test_a_batch_that_becomes_full_does_not_wait(self) -> None:
        engine = self.engine(batch_wait_ms=100_000.0)
        for _ in range(3):
            self.refused(engine, 1000.0)
        assert not self.refused(engine, 4 * 1.5 + 0.1)
        engine.run_to_idle()

    def test_ranks_that_are_missing_count(self) -> None:
        engine = self.engine()
        engine.lose_engine()
        engine.time += 20.0
        engine.recover()
        engine.submit(0, [1] * 64, 5, stops=())
        engine.step()
        engine.lose_engine()
        engine.time += 5.0
        # 15 s until the ranks are back; then prompt and first token of the one that ran are computed again.
        assert self.refused(engine, 15.0 + 2 * 1.5)
        assert not self.refused(engine, 15.0 + 3 * 1.5)
        engine.recover()
        engine.run_to_idle()

    @pytest.mark.parametrize("ahead", [0, 3])
    @pytest.mark.parametrize("own", [True, False])
    def test_a_target_that_no_idle_engine_meets_is_not_to_be_tried_again(self, ahead: int, own: bool) -> None:
        """An OpenAI client would repeat a 429; 128 tokens take two steps and 3 s, whatever else there is."""
        engine = self.engine(ttft_target_ms=None if own else 2900.0)
        options = {"ttft_target_ms": 2900.0} if own else {}
        for number in range(ahead):
            engine.submit(number, [number + 1] * 64, 1, stops=(), ttft_target_ms=1e6)
        engine.submit(10, [11] * 128, 1, stops=(), **options)
        failed = engine.failures[10]
        assert (failed.status, failed.type, failed.code) == (400, "invalid_request_error", "ttft_target_unreachable")
        assert failed.retry_after is None
        assert failed.param == ("ttft_target_ms" if own else "prompt")
        assert ("--ttft-target-ms" in failed.message) == (not own)
        engine.submit(11, [12] * 128, 1, stops=(), ttft_target_ms=3100.0)
        if ahead:
            assert (engine.failures[11].status, engine.failures[11].code) == (429, "ttft_target")
        else:
            assert 11 not in engine.failures
        engine.run_to_idle()

    def test_a_batch_wait_longer_than_the_target_is_not_to_be_tried_again(self) -> None:
        engine = self.engine(batch_wait_ms=2000.0)
        engine.submit(0, [1] * 64, 1, stops=(), ttft_target_ms=3400.0)
        assert engine.failures[0].status == 400

    def test_a_cached_prompt_is_in_time(self) -> None:
        engine = self.engine()
        engine.submit(0, [1] * 128, 1, stops=())
        engine.run_to_idle()
        engine.submit(1, [1] * 128, 1, stops=(), ttft_target_ms=1000.0)
        assert not engine.failures
        engine.run_to_idle()

    def test_a_full_queue_says_when_it_has_drained(self) -> None:
        engine = self.engine(max_queue_requests=6)
        engine.lose_engine()
        for number in range(6):
            engine.submit(number, [number + 1] * 64, 1, stops=())
        engine.submit(6, [9] * 10, 1, stops=())
        assert (engine.failures[6].code, engine.failures[6].retry_after) == ("queue_full", 9)  # 6 x 1.5 s
        engine.recover()
        engine.run_to_idle()

    def test_a_full_queue_of_which_nothing_is_known_says_a_second(self) -> None:
        engine = Engine(max_queue_tokens=20)
        engine.lose_engine()
        engine.submit(0, [1] * 20, 1, stops=())
        engine.submit(1, [1], 1, stops=())
        assert (engine.failures[1].code, engine.failures[1].retry_after) == ("queue_full", 1)
        engine.recover()
        engine.run_to_idle()


coefficients = st.tuples(*(st.sampled_from([0.0, 0.5 * scale, scale]) for scale in (4e-3, 2e-4, 5e-4, 4e-7, 2e-8)))
situations = st.fixed_dictionaries(
    {
        "tokens_ahead": st.integers(0, 100_000),
        "requests_ahead": st.integers(0, 100),
        "running": st.integers(0, 64),
        "free_rows": st.integers(-64, 64),
        "decode_context": st.integers(0, 100_000),
    }
)


@given(
    coefficients,
    st.none() | st.floats(0.001, 1),
    st.integers(1, 5000),
    situations,
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1000)), max_size=5),
    st.integers(0, 10_000),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_more_ahead_never_predicts_earlier(
    values: tuple[float, ...],
    max_itl: float | None,
    own: int,
    situation: dict[str, int],
    finishes: list[tuple[float, int]],
    more_tokens: int,
    more_requests: int,
    fewer_rows: int,
) -> None:
    predictor = make(values, 512, max_itl)
    for seconds, outputs in finishes:
        predictor.observe_finish(seconds, outputs)
    worse = situation | {
        "tokens_ahead": situation["tokens_ahead"] + more_tokens,
        "requests_ahead": situation["requests_ahead"] + more_requests,
        "free_rows": situation["free_rows"] - fewer_rows,
    }
    before = predict(predictor, own, **situation)
    assert 0 <= before <= predict(predictor, own, **worse)
