"""Log-probabilities of prompts through the core: complete, once, in order, whatever happens to the request."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.engine_messages import PromptScores, StepResult
from scheduler_proc.core import ProtocolError
from scheduler_proc.events import StepDone
from tests.unit.scheduler_proc.engine import Engine
from tests.unit.scheduler_proc.fake_worker import prompt_scores

PROMPT = [1 + (at * at) % 49 for at in range(45)]


def check(engine: Engine, prompts: dict[int, list[int]]) -> None:
    for request_id, prompt in prompts.items():
        assert engine.scores.get(request_id, []) == prompt_scores(prompt)


def test_b020_b021_a_cached_prefix_is_computed_again() -> None:
    engine = Engine()
    engine.submit(1, PROMPT, 2)
    engine.run_to_idle()
    computed = engine.core.counters.computed_tokens
    engine.submit(2, PROMPT, 2, score_prompt=True)
    engine.submit(3, [*PROMPT, 7, 8], 2, score_prompt=True)
    engine.run_to_idle()
    check(engine, {2: PROMPT, 3: [*PROMPT, 7, 8]})
    assert engine.cached[2] == engine.cached[3] == 0
    assert engine.core.counters.computed_tokens - computed >= len(PROMPT) + len(PROMPT) + 2
    engine.submit(4, PROMPT, 2)
    engine.run_to_idle()
    assert engine.cached[4] == 44


def test_what_a_scored_prompt_computed_is_reused_by_others() -> None:
    engine = Engine()
    engine.submit(1, PROMPT, 2, score_prompt=True)
    engine.run_to_idle()
    engine.submit(2, PROMPT, 2)
    engine.run_to_idle()
    assert engine.cached[2] == 44


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_b036_choices_share_the_prefill_of_their_prompt(together: bool, scored: bool) -> None:
    """n choices are n requests; only the first one computes the prompt, and the others their last, incomplete block."""
    engine = Engine(max_step_tokens=256, prefill_chunk=256) if together else Engine(max_step_tokens=16)
    for choice in range(4):
        engine.submit(choice, PROMPT, 1, score_prompt=scored and choice == 0)
    engine.run_to_idle()
    rest = len(PROMPT) - 44
    assert engine.core.counters.computed_tokens == len(PROMPT) + 3 * rest
    assert engine.core.kv.pool.total - engine.core.kv.pool.num_free == 44 // 4


def test_chunks_of_scored_prompts_are_small() -> None:
    engine = Engine(num_blocks=400, max_step_tokens=1024, prefill_chunk=1024)
    engine.submit(1, PROMPT * 10, 1, score_prompt=True)
    engine.run_to_idle()
    check(engine, {1: PROMPT * 10})
    assert engine.worker.max_tokens_seen <= 128


def test_b078_lists_are_complete_after_preemptions() -> None:
    engine = Engine(num_blocks=32, block_size=4, max_seqs=6, max_step_tokens=16)
    prompts = {number: PROMPT[number : number + 25] for number in range(8)}
    for number, prompt in prompts.items():
        engine.submit(number, prompt, 20, stops=(), score_prompt=number % 2 == 0)
    engine.run_to_idle()
    assert engine.core.planner.num_preemptions > 0
    check(engine, {number: prompt if number % 2 == 0 else [1] for number, prompt in prompts.items()})


def test_after_a_loss_only_what_is_missing_is_told() -> None:
    engine = Engine(max_step_tokens=16)
    engine.submit(1, PROMPT, 3, score_prompt=True)
    engine.step()
    assert len(engine.scores[1]) == 16
    engine.lose_engine()
    engine.recover()
    engine.run_to_idle()
    check(engine, {1: PROMPT})
    assert engine.worker.num_scored == len(PROMPT) - 1 - 16


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_history_gives_each_prompt_its_scores(data: st.DataObject) -> None:
    engine = Engine(
        num_blocks=data.draw(st.integers(20, 40)),
        max_seqs=4,
        max_step_tokens=16,
        kv_shortage=data.draw(st.sampled_from(["recompute", "wait", "swap"])),
        num_host_blocks=data.draw(st.sampled_from([0, 10])),
    )
    prompts: dict[int, list[int]] = {}
    for number in range(data.draw(st.integers(1, 8))):
        start, length = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 30))
        prompts[number] = PROMPT[start : start + length]
        scored = data.draw(st.booleans())
        engine.submit(number, prompts[number], data.draw(st.integers(1, 20)), score_prompt=scored)
        if not scored:
            prompts[number] = [1]
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step()
        if data.draw(st.integers(0, 9)) == 0:
            engine.lose_engine()
            engine.recover()
    engine.run_to_idle()
    failed = {number for number, end in engine.ends.items() if end == "failed"}
    check(engine, {number: prompt for number, prompt in prompts.items() if number not in failed})


@pytest.mark.parametrize(
    "bad",
    [
        {"index": 1},
        {"index": -1},
        {"first": 2},
        {"first": 0},
        {"chosen": bytes(4 * 45)},
    ],
)
def test_scores_that_do_not_follow_are_a_protocol_error(bad: dict[str, Any]) -> None:
    engine = Engine()
    engine.submit(1, PROMPT, 2, score_prompt=True)
    fields = {"index": 0, "first": 1, "chosen": bytes(4 * 32), "ranks": b"", "top_ids": b"", "top_values": b""} | bad
    with pytest.raises(ProtocolError):
        engine.handle(StepDone(1.0, StepResult(0, b"", prompt_scores=(PromptScores(**fields),))))
