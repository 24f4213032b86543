"""Prompts of one body: what validation lets through finds room in the queue of an idle engine, all of it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ipc.messages import ModelInfo
from ipc.validation import InvalidRequest, validate_together
from tests.unit.scheduler_proc.engine import Engine


def model(requests: int, tokens: int) -> ModelInfo:
    return ModelInfo(("m",), 1024, 50, 0, False, max_queue_requests=requests, max_queue_tokens=tokens)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 12), st.integers(1, 60))
def test_what_is_valid_is_admitted_by_an_idle_engine(prompts: list[int], n: int, requests: int, tokens: int) -> None:
    try:
        validate_together(prompts, n, model(requests, tokens), "prompt")
    except InvalidRequest:
        assume(False)
    # One row, and no step done meanwhile: all but the first have to wait, whatever that is.
    engine = Engine(max_seqs=1, max_queue_requests=requests, max_queue_tokens=tokens)
    for number, length in enumerate(length for length in prompts for _ in range(n)):
        engine.submit(number, [number % 40 + 1] * length, 1, stops=())
    assert not engine.failures
    engine.run_to_idle()


@pytest.mark.parametrize("prompts", [[1] * 9, [4] * 5])
def test_what_is_refused_is_refused_by_the_engine_too(prompts: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        validate_together(prompts, 2, model(8, 30), "prompt")
    engine = Engine(max_seqs=1, max_queue_requests=8, max_queue_tokens=30)
    for number, length in enumerate(prompts * 2):
        engine.submit(number, [number % 40 + 1] * length, 1, stops=())
    assert {failed.code for failed in engine.failures.values()} == {"queue_full"}
    engine.run_to_idle()
