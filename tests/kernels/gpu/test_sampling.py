"""Tokens chosen on the device against `gpu_workers.sampling`, and against float64 where sums may round differently."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu_workers.noise import uniform
from gpu_workers.sampling import SamplingBatch
from gpu_workers.sampling import choose_tokens as defined_choice
from kernels import reference
from kernels.gpu.block_statistics import Workspace
from kernels.gpu.sampling import LogProbabilities, argmax, choose_tokens, log_probabilities
from kernels.gpu.tables import trying
from tests.kernels.gpu.device import DEVICE, poisoned

# Of sums of weights, relative: float32 exponents up to 64 have an error of 2^-19, so 2^exponent one of 1.3e-6.
CLOSE = 3e-6

# numpy, which stands in for the device, says what it finds in rows that are no numbers.
not_numbers = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")

vocabularies = st.sampled_from([1, 5, 127, 128, 129, 700, 1500])
seeds = st.integers(0, 1 << 30)


def random_logits(rows: int, vocab: int, seed: int, scale: float = 3.0, step: float = 0.0) -> torch.Tensor:
    """With a `step`, rounded to multiples of it: many are equal. Some are minus infinity, but never all of a row."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=random) * scale
    if step:
        logits = (logits / step).round() * step
    logits[torch.rand(rows, vocab, generator=random) < 0.05] = -torch.inf
    logits[:, seed % vocab] = 0.0
    return logits


def in_wider_rows(logits: torch.Tensor) -> torch.Tensor:
    """On the device, between columns that are not numbers."""
    wider = torch.full((len(logits), logits.shape[1] + 13), torch.nan, dtype=logits.dtype)
    wider[:, : logits.shape[1]] = logits
    return wider.to(DEVICE)[:, : logits.shape[1]]


@dataclass(frozen=True)
class Settings:
    """Of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def batch_of(rows: list[Settings]) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.array([row.temperature for row in rows], dtype=np.float32),
        top_k=np.array([row.top_k for row in rows], dtype=np.int64),
        top_p=np.array([row.top_p for row in rows], dtype=np.float64),
        min_p=np.array([row.min_p for row in rows], dtype=np.float32),
        seeds=np.array([row.seed for row in rows], dtype=np.uint64),
        output_index=np.zeros(len(rows), dtype=np.int64),
        logprobs=np.full(len(rows), -1),
    )


def chosen(logits: torch.Tensor, batch: SamplingBatch, workspace: Workspace | None = None) -> NDArray[np.int32]:
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, uniform(batch.seeds, batch.output_index))
    out = poisoned(len(logits), dtype=torch.int32)
    on_device = [torch.from_numpy(column).to(DEVICE) for column in columns]
    found = choose_tokens(logits.to(DEVICE), *on_device, workspace=workspace, out=out)
    assert found is out
    return out.cpu().numpy()


def possible(logits: torch.Tensor, row: Settings, u: float) -> set[int]:
    """The tokens that float64 gives when limits and draw are moved by as much as float32 sums may be wrong."""
    if row.temperature == 0:
        return {int(logits.numpy().argmax())}
    found = set()
    for of_top_p in (1 - CLOSE, 1, 1 + CLOSE):
        for of_min_p in (1 - CLOSE, 1, 1 + CLOSE):
            top_p = row.top_p * of_top_p if row.top_p < 1 else 1.0
            weights = reference.sampling_weights(
                logits.double(), row.temperature, row.top_k, top_p, min(1.0, row.min_p * of_min_p)
            )
            first, last = reference.draw(weights, u - CLOSE), reference.draw(weights, min(u + CLOSE, 1 - 1e-12))
            found |= set(range(first, last + 1)) & set(weights.nonzero()[:, 0].tolist())
    return found


def assert_possible(ids: NDArray[np.int32], logits: torch.Tensor, rows: list[Settings]) -> int:
    """Each row's id; how many are not those of `gpu_workers.sampling`."""
    batch = batch_of(rows)
    u = uniform(batch.seeds, batch.output_index)
    for index, row in enumerate(rows):
        assert ids[index] in possible(logits[index], row, u[index]), f"row {index}: {row}"
    return int((ids != defined_choice(logits.clone(), batch)).sum())


row_settings = st.builds(
    Settings,
    temperature=st.just(0.0) | st.sampled_from([0.0625, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 7, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.3, 0.9, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    seed=seeds,
)


@given(
    vocab=vocabularies,
    rows=st.lists(row_settings, min_size=1, max_size=4),
    seed=seeds,
    scale=st.sampled_from([0.05, 1.0, 4.0, 30.0]),
    step=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=25)
def test_tokens_are_those_that_the_filters_keep_and_the_draw_hits(vocab, rows, seed, scale, step):
    logits = random_logits(len(rows), vocab, seed, scale, step)
    assert_possible(chosen(in_wider_rows(logits), batch_of(rows)), logits, rows)


ALL_FILTERS = [
    Settings(top_p=0.9, seed=1),
    Settings(top_k=300, seed=2),
    Settings(top_k=300, top_p=0.8, seed=3),
    Settings(top_p=0.95, min_p=0.01, temperature=0.7, seed=4),
    Settings(min_p=0.2, seed=5),
    Settings(seed=6),
    Settings(temperature=0.0),
]


@pytest.mark.parametrize(("scale", "step"), [(0.0, 0.0), (0.01, 0.0), (1.0, 0.0), (1.0, 0.25)])
def test_more_candidates_than_their_list_holds(scale, step):
    logits = random_logits(len(ALL_FILTERS), 1500, 11, scale, step)
    space = Workspace.allocate(len(ALL_FILTERS), 1500, DEVICE, num_candidates=16)
    assert_possible(chosen(logits, batch_of(ALL_FILTERS), space), logits, ALL_FILTERS)
    assert (space.found[:5] > 16).all()


def test_a_token_is_the_same_alone_and_in_any_batch_and_with_any_settings():
    logits = random_logits(len(ALL_FILTERS), 1500, 12, 2.0)
    together = chosen(logits, batch_of(ALL_FILTERS))
    for index, row in enumerate(ALL_FILTERS):
        assert chosen(logits[index : index + 1], batch_of([row]))[0] == together[index]
    other = {"BLOCKS": 4, "num_warps": 2}
    with trying({"statistics": other, "bound": {"num_warps": 2}, "collect": {**other, "BLOCKS": 2}, "choose": other}):
        assert np.array_equal(chosen(logits, batch_of(ALL_FILTERS)), together)


def random_rows(count: int, seed: int) -> list[Settings]:
    random = np.random.default_rng(seed)
    return [
        Settings(
            temperature=float(random.choice(np.array([0.6, 1.0, 1.5], dtype=np.float32))),
            top_k=int(random.choice([0, 0, 20])),
            top_p=float(random.choice([1.0, 0.9])),
            min_p=float(random.choice(np.array([0.0, 0.0, 0.02], dtype=np.float32))),
            seed=int(random.integers(1 << 60)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_draws_are_those_of_the_definition(count):
    rows = random_rows(count, seed=13)
    logits = random_logits(count, 600, 14, 2.5)
    different = assert_possible(chosen(logits, batch_of(rows)), logits, rows)
    assert different <= count // 1000  # and those lie within the rounding of a boundary, or they were not possible


def test_a_whole_vocabulary():
    rows = [Settings(top_p=0.9, seed=1), Settings(top_k=50, top_p=0.95, temperature=0.8, seed=2)]
    logits = random_logits(len(rows), 49152, 15, 2.5)
    logits[1, 40_000:40_030] += 12
    assert_possible(chosen(logits, batch_of(rows)), logits, rows)


def test_the_draw_is_the_inverse_of_the_running_sum():
    # Of two equally likely ids, far apart: which one, the uniform number says.
    logits = torch.full((50, 300), -torch.inf)
    logits[:, [3, 260]] = 0.0
    u = (torch.arange(50, dtype=torch.float64) + 0.5) / 50
    columns = [torch.full((50,), value, device=DEVICE) for value in (1.0, 0, 1.0, 0.0)]
    ids = choose_tokens(logits.to(DEVICE), *columns, u.to(DEVICE))
    assert torch.equal(ids.cpu(), torch.where(u < 0.5, 3, 260).int())


@not_numbers
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_distribution_have_no_token(value):
    logits = random_logits(len(ALL_FILTERS) + 1, 300, 16)
    expected = chosen(logits, batch_of([*ALL_FILTERS, Settings()]))
    if value == -torch.inf:
        logits[:-1] = value
    else:
        logits[:-1, 200] = value
    greedy = {torch.nan: -1, torch.inf: 200, -torch.inf: 0}[value]
    ids = chosen(logits, batch_of([*ALL_FILTERS, Settings()]))
    assert ids.tolist() == [-1] * 6 + [greedy, expected[-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(vocab=vocabularies, rows=st.integers(1, 5), seed=seeds, step=st.sampled_from([0.0, 1.0]))
@settings(max_examples=10)
def test_argmax_takes_the_lowest_of_equals(dtype, vocab, rows, seed, step):
    logits = random_logits(rows, vocab, seed, step=step).to(dtype)
    out = poisoned(rows, dtype=torch.int32)
    argmax(in_wider_rows(logits), out=out)
    assert out.tolist() == logits.float().numpy().argmax(-1).tolist()


@not_numbers
def test_argmax_of_rows_with_a_nan():
    logits = torch.zeros(4, 300, device=DEVICE)
    logits[0, 299] = torch.nan
    logits[1] = torch.nan
    logits[2, [140, 141]] = torch.inf
    logits[3] = -torch.inf
    assert argmax(logits).tolist() == [-1, -1, 140, 0]


@given(
    vocab=vocabularies,
    rows=st.integers(1, 3),
    seed=seeds,
    top=st.sampled_from([0, 1, 5, 20]),
    step=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=15)
def test_log_probabilities(vocab, rows, seed, top, step):
    top = min(top, vocab)
    logits = random_logits(rows, vocab, seed, 4.0, step)
    token_ids = torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, rows))
    out = LogProbabilities(
        poisoned(rows, dtype=torch.float32),
        poisoned(rows, top, dtype=torch.int32),
        poisoned(rows, top, dtype=torch.float32),
        poisoned(rows, dtype=torch.int32),
    )
    log_probabilities(in_wider_rows(logits), token_ids.to(DEVICE), top=top, out=out)
    table = torch.log_softmax(logits.double(), dim=-1)
    of_chosen = table.gather(1, token_ids[:, None])
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    # Two differences of numbers below 32 are rounded to float32, and a logarithm below 8.
    close = {"rtol": 0.0, "atol": 6e-6}
    torch.testing.assert_close(out.chosen.cpu().double(), of_chosen[:, 0], **close)
    assert torch.equal(out.ranks.cpu(), (table > of_chosen).sum(-1, dtype=torch.int32) + 1)
    assert torch.equal(out.top_ids.cpu(), best.int())
    torch.testing.assert_close(out.top_values.cpu().double(), table.gather(1, best), **close)


@not_numbers
def test_log_probabilities_of_no_token_and_of_no_numbers():
    logits = torch.zeros(3, 300, device=DEVICE)
    logits[1, 7] = torch.nan
    logits[2] = torch.inf
    found = log_probabilities(logits, torch.tensor([-1, 5, 5], device=DEVICE), top=2)
    assert found.chosen.isnan().all()
    assert found.top_ids.tolist() == [[0, 1], [-1, -1], [-1, -1]]
    assert not found.top_values[0].isnan().any()
    assert found.top_values[1:].isnan().all()
