"""Allowed ids and bad words, against logits processors of transformers; and that no row is left without a token."""

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, PrefixConstrainedLogitsProcessor

from gpu_workers.rows import PlanError
from gpu_workers.sampler_state import SamplerState
from gpu_workers.sampling import edit_logits, sample
from ipc.codec import pack_ints
from tests.unit.gpu_workers.plans import new_row, spec
from tests.unit.gpu_workers.test_sampling_oracle import VOCAB, batch_of, random_logits

WORDS = [[7], [20, 21], [20, 22], [30, 31, 32], [31, 32]]


def packed(words: list[list[int]]) -> tuple[bytes, ...]:
    return tuple(pack_ints(word) for word in words)


@pytest.mark.parametrize("output", [[], [20], [30, 31], [31], [5, 31], [20, 21, 20], [30, 31, 9]], ids=str)
def test_bad_words_like_transformers(output: list[int]) -> None:
    prompt = [900, 901]
    logits = random_logits(1, seed=1)
    processor = NoBadWordsLogitsProcessor(WORDS, eos_token_id=torch.tensor([1]))
    expected = processor(torch.tensor([prompt + output]), logits.clone())
    edited = logits.clone()
    edit_logits(edited, batch_of([(prompt + output, 2, spec(bad_words=packed(WORDS)))]))
    assert torch.equal(edited, expected)


def test_the_end_of_the_prompt_is_no_part_of_a_bad_word() -> None:
    logits = random_logits(1, seed=1)
    edited = logits.clone()
    edit_logits(edited, batch_of([([5, 20], 2, spec(bad_words=packed([[20, 21]])))]))
    assert torch.equal(edited, logits)


def test_bad_words_follow_the_output_as_it_grows() -> None:
    state = SamplerState(2, VOCAB)
    state.add(new_row(1, [5, 6], [0], sampling=spec(bad_words=packed(WORDS))))
    rows = np.array([1], dtype=np.int32)
    outputs = [30, 31, 20, 4]
    for count in range(len(outputs) + 1):
        kept, rebuilt = random_logits(1, seed=2), random_logits(1, seed=2)
        edit_logits(kept, state.batch(rows, np.array([count])))
        edit_logits(rebuilt, batch_of([([5, 6, *outputs[:count]], 2, spec(bad_words=packed(WORDS)))]))
        assert torch.equal(kept, rebuilt)
        if count < len(outputs):
            state.record(rows, np.array([outputs[count]]))


def test_allowed_ids_like_transformers() -> None:
    allowed = [3, 17, 1999]
    logits = random_logits(3, seed=3)
    processor = PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1)
    expected = processor(torch.zeros(3, 2, dtype=torch.long), logits.clone())
    edited = logits.clone()
    sampling = spec(allowed_ids=pack_ints(allowed))
    edit_logits(edited, batch_of([([1], 1, sampling), ([1], 1, spec()), ([1], 1, sampling)]))
    assert torch.equal(edited[[0, 2]], expected[[0, 2]])
    assert torch.equal(edited[1], logits[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_always_has_a_token_left(temperature: float) -> None:
    """Bans that would leave nothing of what is allowed are not applied: no NaN ends the rank."""
    samplings = [
        spec(temperature=temperature, allowed_ids=pack_ints([4]), banned=[4], min_tokens=5),
        spec(temperature=temperature, allowed_ids=pack_ints([4, 5]), bad_words=packed([[4], [5]]), seed=3),
        spec(temperature=temperature, allowed_ids=pack_ints([4, 5]), bad_words=packed([[4]]), seed=3),
        spec(temperature=temperature, bad_words=packed([[token] for token in range(VOCAB)])),
    ]
    token_ids, _ = sample(random_logits(4, seed=4), batch_of([([1, 2], 2, sampling) for sampling in samplings]))
    assert token_ids[0] == 4
    assert token_ids[1] in (4, 5)
    assert token_ids[2] == 5


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 0.0])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_b029_tiny_temperatures_are_greedy(temperature: float, scale: float) -> None:
    logits = random_logits(8, seed=5) * scale
    sampling = spec(temperature=temperature, top_p=1e-4, seed=9)
    token_ids, _ = sample(logits.clone(), batch_of([([1], 1, sampling)] * 8))
    assert token_ids.tolist() == logits.argmax(-1).tolist()


def test_rows_that_are_limited_are_not_plain() -> None:
    state = SamplerState(3, VOCAB)
    state.add(new_row(0, [1], [0], sampling=spec(allowed_ids=pack_ints([4]))))
    state.add(new_row(1, [1], [0], sampling=spec(bad_words=packed([[4]]))))
    state.add(new_row(2, [1], [0], sampling=spec()))
    assert [state.all_plain(np.array([row], dtype=np.int32)) for row in range(3)] == [False, False, True]
    state.free([0])
    state.add(new_row(0, [1], [0], sampling=spec()))
    assert state.all_plain(np.array([0, 2], dtype=np.int32))


@pytest.mark.parametrize(
    "sampling",
    [
        spec(allowed_ids=pack_ints([VOCAB])),
        spec(allowed_ids=pack_ints([-1])),
        spec(bad_words=packed([[1, VOCAB]])),
        spec(bad_words=(b"",)),
        spec(bad_words=(b"abc",)),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused(sampling) -> None:
    with pytest.raises(PlanError):
        SamplerState(1, VOCAB).add(new_row(0, [1], [0], sampling=sampling))
