"""The native choice of tokens against `gpu_workers.sampling`, whose filters are held against those of transformers."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu_workers.backends.native_cpu import NativeCpuBackend
from gpu_workers.noise import uniform
from gpu_workers.sampling import SamplingBatch, filtered_probabilities, sample

seeds = st.integers(0, 1 << 30)
sizes = st.integers(1, 200) | st.sampled_from([511, 512, 513, 1024, 5000])
CLOSE = 1e-6  # to a limit: float32 sums may fall on either side


@pytest.fixture(autouse=True)
def compiled(library: ctypes.CDLL) -> Iterator[None]:
    """Skips where there are no native kernels; leaves torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def backends(library: ctypes.CDLL) -> list[NativeCpuBackend]:
    return [NativeCpuBackend(torch.float32, threads, quantized=True) for threads in (1, 3)]


def batch_of(rows: int, seed: int = 0, **settings: float) -> SamplingBatch:
    """Rows that differ in their seeds and output indices."""
    return SamplingBatch(
        temperature=np.full(rows, settings.get("temperature", 1.0), dtype=np.float32),
        top_k=np.full(rows, settings.get("top_k", 0), dtype=np.int64),
        top_p=np.full(rows, settings.get("top_p", 1.0), dtype=np.float64),
        min_p=np.full(rows, settings.get("min_p", 0.0), dtype=np.float32),
        seeds=np.arange(seed, seed + rows, dtype=np.uint64),
        output_index=np.arange(rows, dtype=np.int64),
        logprobs=np.full(rows, -1, dtype=np.int64),
    )


def random_logits(rows: int, vocab: int, seed: int, scale: float, step: float = 0.0) -> torch.Tensor:
    """With a `step`, rounded to multiples of it: many are equal. Some are minus infinity, but never all."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=random) * scale
    if step:
        logits = (logits / step).round() * step
    logits[torch.rand(rows, vocab, generator=random) < 0.05] = -torch.inf
    logits[:, seed % vocab] = 0.0
    return logits


def assert_drawn(ids: NDArray[np.int64], logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Each is where the running sum of the weights that the filters keep passes u times their total."""
    weights = filtered_probabilities(logits, batch, np.arange(len(ids))).double().numpy()
    for row, (token_id, u) in enumerate(zip(ids, uniform(batch.seeds, batch.output_index), strict=True)):
        running = weights[row].cumsum() / weights[row].sum()
        assert weights[row, token_id] > 0
        assert running[token_id] >= u - CLOSE
        assert token_id == 0 or running[token_id - 1] <= u + CLOSE


@given(
    vocab=sizes,
    rows=st.integers(1, 5),
    seed=seeds,
    scale=st.sampled_from([0.05, 1.0, 4.0, 30.0]),
    step=st.sampled_from([0.0, 0.5]),
    temperature=st.floats(0.0625, 3.0, width=32),
    top_k=st.just(0) | st.integers(1, 6000),
    top_p=st.just(1.0) | st.floats(0.0, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0, width=32),
)
@example(5000, 2, 1, 0.05, 0.0, 1.0, 0, 0.9, 0.0)  # kept: more than those first looked at
@example(5000, 2, 1, 4.0, 0.0, 1.0, 50, 0.95, 0.0)
@example(5000, 1, 1, 4.0, 0.5, 1.0, 79, 1.0, 0.0)  # as many as there are blocks, and one more
@example(5000, 1, 1, 4.0, 0.5, 1.0, 80, 1.0, 0.0)
@settings(deadline=None)
def test_tokens_are_drawn_from_what_the_filters_keep(
    backends, vocab, rows, seed, scale, step, temperature, top_k, top_p, min_p
):
    logits = random_logits(rows, vocab, seed, scale, step)
    batch = batch_of(rows, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # What the filters keep must not hang on a rounding.
    before_p = batch_of(rows, seed, temperature=temperature, top_k=top_k)
    weights = filtered_probabilities(logits, before_p, np.arange(rows)).double()
    mass = weights.sort(descending=True, dim=-1).values.cumsum(dim=-1)
    assume(top_p == 1.0 or (mass - top_p).abs().min() > CLOSE)
    relative = weights / weights.amax(dim=-1, keepdim=True)
    assume(min_p in (0.0, 1.0) or (relative - min_p).abs().min() > CLOSE)
    ids = [backend.choose_tokens(logits, batch) for backend in backends]
    assert np.array_equal(ids[0], ids[1])
    assert_drawn(ids[0], logits, batch)


@given(seed=seeds, rows=st.integers(2, 9))
@settings(deadline=None, max_examples=settings.default.max_examples // 4)
def test_a_token_is_the_same_alone_and_in_any_batch(backends, seed, rows):
    random = np.random.default_rng(seed)
    logits = random_logits(rows, 3000, seed, 3.0)
    batch = SamplingBatch(
        temperature=random.choice(np.array([0.0, 0.7, 1.3], dtype=np.float32), rows),
        top_k=random.choice([0, 1, 40], rows),
        top_p=random.choice([0.5, 0.9, 1.0], rows),
        min_p=random.choice(np.array([0.0, 0.1], dtype=np.float32), rows),
        seeds=random.integers(0, 1 << 63, rows, dtype=np.uint64),
        output_index=random.integers(0, 1000, rows),
        logprobs=np.full(rows, -1),
    )
    together = backends[1].choose_tokens(logits, batch)
    for row in range(rows):
        alone = SamplingBatch(**{name: getattr(batch, name)[row : row + 1] for name in SamplingBatch.__slots__[:7]})
        assert backends[0].choose_tokens(logits[row : row + 1].clone(), alone)[0] == together[row]


def test_rows_that_are_a_part_of_wider_ones(backends):
    wider = random_logits(4, 2050, seed=5, scale=3.0)
    wider[:, 2000:] = 100.0
    logits, batch = wider[:, :2000], batch_of(4, top_k=40)
    batch.temperature[1] = 0.0
    for backend in backends:
        assert np.array_equal(backend.choose_tokens(logits, batch), backend.choose_tokens(logits.clone(), batch))


def test_greedy_takes_the_lowest_of_equals(backends):
    logits = torch.zeros(3, 2000)
    logits[1, [40, 1999]] = 2.5
    logits[2, [1500, 30, 31]] = 1.0
    logits[2, 5] = -torch.inf
    for temperature in (0.0, 0.9e-5):
        for backend in backends:
            assert backend.choose_tokens(logits, batch_of(3, temperature=temperature)).tolist() == [0, 40, 30]


def test_every_number_that_can_be_drawn_gives_a_possible_token(backends):
    # Of two equally likely ids, far apart: which one, the uniform number says.
    logits = torch.full((1000, 1500), -torch.inf)
    logits[:, [3, 1400]] = 0.0
    batch = batch_of(1000)
    u = uniform(batch.seeds, batch.output_index)
    for backend in backends:
        assert np.array_equal(backend.choose_tokens(logits, batch), np.where(u < 0.5, 3, 1400))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.5}])
def test_logits_that_are_not_numbers_are_an_error(backends, value, filters):
    for position in (0, 100, 1999):
        logits = random_logits(2, 2000, seed=7, scale=2.0)
        logits[1, position] = value
        with pytest.raises(FloatingPointError):
            backends[0].choose_tokens(logits, batch_of(2, **filters))


def test_a_greedy_nan_is_an_error(backends):
    logits = random_logits(2, 2000, seed=7, scale=2.0)
    logits[1, 1000] = torch.nan
    with pytest.raises(FloatingPointError):
        backends[0].choose_tokens(logits, batch_of(2, temperature=0.0))


def test_edits_come_before_the_choice_and_logprobs_with_it(backends):
    logits = random_logits(2, 2000, seed=3, scale=2.0)
    batch = batch_of(2, top_k=20, temperature=0.8)
    batch.logprobs[:] = 3
    expected = sample(logits.clone(), batch)
    assert (sample(logits.clone(), batch, choose=backends[0].choose_tokens)[0] == expected[0]).all()
    assert sample(logits.clone(), batch, choose=backends[0].choose_tokens)[1] == expected[1]
