"""Draws follow the distribution they should, and a row's draw does not depend on the rest of the batch."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpu_workers.sampling import sample
from tests.chi_square import chi_square, chi_square_bound
from tests.unit.gpu_workers.plans import spec
from tests.unit.gpu_workers.test_sampling_oracle import VOCAB, batch_of, random_logits

DRAWS = 20_000


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def draws(logits: torch.Tensor, seeds, **settings) -> np.ndarray:
    """One draw per seed from the same [1, V] logits."""
    found = []
    for start in range(0, len(seeds), 500):
        part = seeds[start : start + 500]
        requests = [([1, 2], 2, spec(seed=int(seed), **settings)) for seed in part]
        found.append(sample(logits.repeat(len(part), 1), batch_of(requests))[0])
    return np.concatenate(found)


CASES = {
    "temperature": ({"temperature": 0.8}, [TemperatureLogitsWarper(0.8)]),
    "top_k": ({"temperature": 1.0, "top_k": 12}, [TopKLogitsWarper(12)]),
    "top_p": ({"temperature": 1.3, "top_p": 0.8}, [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)]),
    "min_p": ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name):
    settings, warpers = CASES[name]
    logits = random_logits(1, seed=8, scale=2.5)
    target = torch.softmax(LogitsProcessorList(warpers)(None, logits.double()), dim=-1)[0].numpy()
    statistic, degrees = chi_square(draws(logits, range(DRAWS), **settings), target)
    assert degrees >= 5
    assert statistic < chi_square_bound(degrees)


def test_the_statistic_notices_a_slight_bias():
    logits = random_logits(1, seed=8, scale=2.5)
    target = torch.softmax(logits.double(), dim=-1)[0].numpy()
    statistic, degrees = chi_square(draws(logits, range(DRAWS), temperature=0.95), target)
    assert statistic > chi_square_bound(degrees)


def test_draws_of_one_request_follow_the_distribution():
    logits = random_logits(1, seed=9, scale=2.5)
    target = torch.softmax(logits.double(), dim=-1)[0].numpy()
    found = []
    same_seed = batch_of([([1, 2], 2, spec(temperature=1.0, seed=1234))] * 500)
    for start in range(0, DRAWS, 500):
        batch = dataclasses.replace(same_seed, output_index=np.arange(start, start + 500))
        found.append(sample(logits.repeat(500, 1), batch)[0])
    statistic, degrees = chi_square(np.concatenate(found), target)
    assert statistic < chi_square_bound(degrees)


def test_same_seed_and_index_same_token_and_other_index_other_token():
    logits = torch.zeros(1, VOCAB)
    same = draws(logits, [77, 77, 77], temperature=1.0)
    assert len(set(same.tolist())) == 1
    requests = [([1] * n, 1, spec(temperature=1.0, seed=77)) for n in range(1, 9)]
    assert len(set(sample(logits.repeat(8, 1), batch_of(requests))[0].tolist())) == 8


sampling_specs = st.builds(
    spec,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 30, 1500]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.95, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.4]),
    bias=st.sampled_from([{}, {}, {3: 4.0, 17: -2.0}]),
    banned=st.just([5, 6]),
    min_tokens=st.sampled_from([0, 100]),
    logprobs=st.sampled_from([-1, -1, 0, 5]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(sampling_specs, min_size=1, max_size=9), st.sampled_from([2.0, 0.2]), st.integers(0, 1000))
def test_a_row_alone_and_in_a_batch_is_the_same(samplings, scale, seed):
    requests = [([1, 2, 3, 4] * (i + 1), 3, sampling) for i, sampling in enumerate(samplings)]
    logits = random_logits(len(requests), seed=seed, scale=scale)
    token_ids, logprobs = sample(logits.clone(), batch_of(requests))
    for i, request in enumerate(requests):
        alone, alone_logprobs = sample(logits[i : i + 1].clone(), batch_of([request]))
        assert alone[0] == token_ids[i]
        assert (alone_logprobs or (None,))[0] == (logprobs or [None] * len(requests))[i]


def test_row_independence_at_an_odd_vocabulary_size():
    logits = random_logits(33, seed=11, vocab=VOCAB - 7)
    requests = [([1, 2], 2, spec(temperature=1.1, seed=i, top_p=0.97, logprobs=2)) for i in range(33)]
    token_ids, logprobs = sample(logits.clone(), batch_of(requests))
    for i in range(33):
        alone, alone_logprobs = sample(logits[i : i + 1].clone(), batch_of(requests[i : i + 1]))
        assert (alone[0], alone_logprobs[0]) == (token_ids[i], logprobs[i])
