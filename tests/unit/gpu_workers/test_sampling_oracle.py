"""Penalties, bias and filters against the logits processors of transformers, and the order they are applied in."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpu_workers.sampler_state import SamplerState
from gpu_workers.sampling import SamplingBatch, argmax, edit_logits, filtered_probabilities, sample
from ipc.codec import unpack_floats, unpack_ints
from tests.unit.gpu_workers.plans import new_row, spec

VOCAB = 2000


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def random_logits(rows: int, seed: int, scale: float = 4.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def batch_of(requests) -> SamplingBatch:
    """The sampler's batch for (token ids, num_prompt, spec) triples, in rows of their order."""
    state = SamplerState(len(requests), VOCAB)
    for row, (token_ids, num_prompt, sampling) in enumerate(requests):
        state.add(new_row(row, token_ids, [0], num_prompt=num_prompt, sampling=sampling))
    rows = np.arange(len(requests), dtype=np.int32)
    return state.batch(rows, np.array([len(token_ids) - num_prompt for token_ids, num_prompt, _ in requests]))


def simple_batch(samplings) -> SamplingBatch:
    return batch_of([([1, 2, 3], 3, sampling) for sampling in samplings])


FILTERS = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "hot": ({"temperature": 1.9}, [TemperatureLogitsWarper(1.9)]),
    "top_k": ({"temperature": 1.0, "top_k": 40}, [TopKLogitsWarper(40)]),
    "top_k 1": ({"temperature": 1.0, "top_k": 1}, [TopKLogitsWarper(1)]),
    "top_k above the vocabulary": ({"temperature": 1.0, "top_k": VOCAB + 5}, [TopKLogitsWarper(VOCAB + 5)]),
    "top_p": ({"temperature": 1.0, "top_p": 0.9}, [TopPLogitsWarper(0.9)]),
    "top_p small": ({"temperature": 1.0, "top_p": 0.01}, [TopPLogitsWarper(0.01)]),
    "min_p": ({"temperature": 1.0, "min_p": 0.05}, [MinPLogitsWarper(0.05)]),
    "all": (
        {"temperature": 1.2, "top_k": 60, "top_p": 0.8, "min_p": 0.02},
        [TemperatureLogitsWarper(1.2), TopKLogitsWarper(60), TopPLogitsWarper(0.8), MinPLogitsWarper(0.02)],
    ),
}


@pytest.mark.parametrize("scale", [4.0, 0.3], ids=["peaked", "flat"])
@pytest.mark.parametrize("name", FILTERS)
def test_filters_keep_what_transformers_keeps(name, scale):
    settings, warpers = FILTERS[name]
    logits = random_logits(16, seed=1, scale=scale)
    expected = torch.softmax(LogitsProcessorList(warpers)(None, logits.clone()), dim=-1)
    weights = filtered_probabilities(logits, simple_batch([spec(**settings)] * 16), np.arange(16))
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights / weights.sum(dim=-1, keepdim=True), expected, rtol=1e-5, atol=1e-9)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    for top_p, kept in [(0.3, [1]), (0.5, [1, 3]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3]), (0.0, [1])]:
        batch = simple_batch([spec(temperature=1.0, top_p=top_p)])
        weights = filtered_probabilities(probabilities.log(), batch, np.arange(1))
        assert torch.nonzero(weights[0]).flatten().tolist() == kept


def test_top_p_wider_than_the_candidates():
    logits = torch.zeros(2, VOCAB)
    logits[0] = torch.linspace(0, 0.01, VOCAB)
    logits[1, 7] = 20.0
    batch = simple_batch([spec(temperature=1.0, top_p=0.9)] * 2)
    expected = torch.softmax(TopPLogitsWarper(0.9)(None, logits.double()), dim=-1)
    weights = filtered_probabilities(logits, batch, np.arange(2))
    assert int((weights[0] > 0).sum()) > 1024
    assert abs(int((weights[0] > 0).sum()) - int((expected[0] > 0).sum())) <= 1
    assert torch.nonzero(weights[1]).flatten().tolist() == [7]


def test_penalties_bias_and_bans_like_transformers():
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(0, VOCAB, (4, 300), generator=generator)
    logits = random_logits(4, seed=2)
    bias = {int(token_ids[0, 3]): 5.0, 11: -100.0, 1999: 0.25}
    banned = [4, 9, 11]
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[key], value] for key, value in bias.items()]),
            MinNewTokensLengthLogitsProcessor(200, 200, banned),
            RepetitionPenaltyLogitsProcessor(1.7),
        ]
    )
    expected = processors(token_ids, logits.clone())
    sampling = spec(bias=bias, banned=banned, min_tokens=200, repetition_penalty=1.7)
    edited = logits.clone()
    edit_logits(edited, batch_of([(row.tolist(), 200, sampling) for row in token_ids]))
    assert torch.equal(edited, expected)


def test_presence_and_frequency_look_at_the_output_only():
    # OpenAI's definition: mu[j] -= c[j] * frequency + (c[j] > 0) * presence, c counting sampled tokens.
    logits = random_logits(1, seed=3)
    prompt, output = [1, 2, 3, 3], [3, 7, 7, 7]
    edited = logits.clone()
    sampling = spec(presence_penalty=0.5, frequency_penalty=0.25)
    edit_logits(edited, batch_of([(prompt + output, 4, sampling)]))
    expected = logits.clone()
    expected[0, 3] -= 0.25 + 0.5
    expected[0, 7] -= 3 * 0.25 + 0.5
    torch.testing.assert_close(edited, expected, rtol=0, atol=1e-6)
    assert torch.equal(edited[0, [1, 2]], logits[0, [1, 2]])


def test_counts_kept_while_sampling_equal_those_rebuilt_after_preemption():
    sampling = spec(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2)
    prompt = [5, 6, 7] * 3
    output = np.random.default_rng(0).integers(0, 150, size=400)
    state = SamplerState(1, VOCAB)
    state.add(new_row(0, prompt, [0], sampling=sampling))
    row = np.array([0], dtype=np.int32)
    for token_id in output:
        state.record(row, np.array([token_id]))
    kept, rebuilt = random_logits(1, seed=4), random_logits(1, seed=4)
    edit_logits(kept, state.batch(row, np.array([400])))
    edit_logits(rebuilt, batch_of([([*prompt, *output.tolist()], 9, sampling)]))
    assert torch.equal(kept, rebuilt)
    assert not torch.equal(kept, random_logits(1, seed=4))


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(3, VOCAB)
    logits[1, [40, 1999]] = 2.5
    logits[2, [1500, 30, 31]] = 1.0
    assert argmax(logits).tolist() == [0, 40, 30]
    token_ids, _ = sample(logits, simple_batch([spec(logprobs=0)] * 3))
    assert token_ids.tolist() == [0, 40, 30]


def test_logprobs_are_after_penalties_and_before_temperature():
    logits = random_logits(3, seed=6)
    samplings = [
        spec(temperature=0.5, seed=1, top_k=5, logprobs=4, bias={10: 30.0}),
        spec(),
        spec(logprobs=0, bias={3: 40.0}),
    ]
    expected = logits.clone()
    expected[0, 10] += 30
    expected[2, 3] += 40
    expected = torch.log_softmax(expected, dim=-1)
    token_ids, logprobs = sample(logits.clone(), simple_batch(samplings))
    assert token_ids.tolist()[0] == 10
    assert token_ids.tolist()[2] == 3
    assert logprobs[1] is None
    best = torch.topk(expected[0], 4)
    assert list(unpack_ints(logprobs[0].top_ids)) == best.indices.tolist()
    np.testing.assert_allclose(unpack_floats(logprobs[0].top_values), best.values.numpy(), rtol=1e-6, atol=1e-6)
    assert logprobs[0].chosen == pytest.approx(float(expected[0, 10]), abs=1e-6)
    assert logprobs[2].chosen == pytest.approx(float(expected[2, 3]), abs=1e-6)
    assert logprobs[2].top_ids == b""


def test_best_logprobs_list_ties_by_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 1.0
    _, logprobs = sample(logits, simple_batch([spec(logprobs=3)]))
    assert list(unpack_ints(logprobs[0].top_ids)) == [9, 0, 1]


def test_nan_is_an_error_for_drawn_and_greedy_rows():
    for sampling in (spec(logprobs=0), spec(temperature=1.0), spec(temperature=1.0, top_p=0.5, top_k=3)):
        logits = random_logits(2, seed=7)
        logits[1, 100] = torch.nan
        with pytest.raises(FloatingPointError):
            sample(logits, simple_batch([sampling] * 2))
