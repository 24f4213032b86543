"""Changes of logits on the device: bit by bit those of `gpu_workers.sampling.edit_logits`, and what masks leave."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu_workers.sampling import Bias, LogitEdit, Penalties, SamplingBatch, edit_logits
from kernels.gpu.penalties import apply_bias, apply_bitmask, apply_penalties, ban
from tests.kernels.gpu.device import DEVICE, poisoned

seeds = st.integers(0, 1 << 30)
shapes = st.tuples(st.integers(1, 5), st.sampled_from([1, 31, 32, 100, 700]))


def random_logits(rows: int, vocab: int, random: np.random.Generator) -> torch.Tensor:
    logits = torch.from_numpy(random.standard_normal((rows, vocab), dtype=np.float32)) * 4
    logits[torch.from_numpy(random.random((rows, vocab)) < 0.1)] = -torch.inf
    return logits


def random_entries(rows: int, vocab: int, random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and ids of up to 400 logits, none twice."""
    flat = random.permutation(rows * vocab)[: random.integers(1, 401)]
    return flat // vocab, flat % vocab


def edited(logits: torch.Tensor, **edits: LogitEdit) -> torch.Tensor:
    rows = len(logits)
    empty = np.zeros(rows)
    result = logits.clone()
    edit_logits(result, SamplingBatch(empty, empty, empty, empty, empty, empty, empty, **edits))
    return result


def wider(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocab + 9] on the device, of which the last columns are not numbers."""
    return torch.nn.functional.pad(logits, (0, 9), value=torch.nan).to(DEVICE)


def assert_edited(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit; beside the logits nothing has changed."""
    vocab = expected.shape[1]
    assert torch.equal(found[:, :vocab].cpu().view(torch.int32), expected.view(torch.int32))
    assert found[:, vocab:].isnan().all()


def on_device(*columns: NDArray[np.generic], skipped: int) -> list[torch.Tensor]:
    """The columns; the first one, of rows, and with it all others, is longer by entries that are to be skipped."""
    rows, *others = columns
    return [
        torch.from_numpy(np.append(column, np.full(skipped, value, dtype=column.dtype))).to(DEVICE)
        for column, value in [(rows, -1), *((other, 7) for other in others)]
    ]


@given(shape=shapes, seed=seeds, skipped=st.sampled_from([0, 3, 300]), width=st.sampled_from([np.int32, np.int64]))
@settings(max_examples=25)
def test_edits_have_the_bits_of_the_definition(shape, seed, skipped, width):
    random = np.random.default_rng(seed)
    logits = random_logits(*shape, random)
    rows, ids = (column.astype(width) for column in random_entries(*shape, random))
    count = len(rows)

    values = random.standard_normal(count, dtype=np.float32)
    found = wider(logits)
    apply_bias(found[:, : shape[1]], *on_device(rows, ids, values, skipped=skipped))
    assert_edited(found, edited(logits, bias=Bias(rows, ids, values)))

    ban(found[:, : shape[1]], *on_device(rows, ids, skipped=skipped))
    assert_edited(found, edited(logits, banned=LogitEdit(rows, ids)))

    counts = random.integers(0, 9, count).astype(np.float32)
    penalties = [
        random.choice(np.array(of_one, dtype=np.float32), count)
        for of_one in ([1.0, 1.3, 0.7, 1.05], [0.0, 0.6, -1.3], [0.0, 0.3, 0.1, -0.7])
    ]
    found = wider(logits)
    apply_penalties(found[:, : shape[1]], *on_device(rows, ids, counts, *penalties, skipped=skipped))
    assert_edited(found, edited(logits, penalties=Penalties(rows, ids, counts, *penalties)))


def test_no_entries_change_nothing():
    logits = torch.ones(2, 5, device=DEVICE)
    nothing, numbers = torch.empty(0, dtype=torch.int32, device=DEVICE), torch.empty(0, device=DEVICE)
    apply_bias(logits, nothing, nothing, numbers)
    ban(logits, nothing, nothing)
    apply_penalties(logits, nothing, nothing, *[numbers] * 4)
    assert torch.equal(logits.cpu(), torch.ones(2, 5))


def packed(allowed: NDArray[np.bool_], words: int) -> torch.Tensor:
    """[R, V] -> [R, words] int32, bits beyond the vocabulary set."""
    padded = np.pad(allowed, ((0, 0), (0, 32 * words - allowed.shape[1])), constant_values=True)
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())


@given(shape=shapes, seed=seeds, more_words=st.integers(0, 2), share=st.sampled_from([0.0, 0.01, 0.5, 1.0]))
@settings(max_examples=25)
def test_masks_leave_what_they_allow(shape, seed, more_words, share):
    random = np.random.default_rng(seed)
    vocab = shape[1]
    logits = random_logits(*shape, random)
    rows = random.permutation(shape[0])[: random.integers(1, shape[0] + 1)]
    allowed = random.random((len(rows), vocab)) < share
    mask = packed(allowed, -(-vocab // 32) + more_words)
    skipped = int(random.integers(0, len(rows) + 1))
    given_rows = torch.from_numpy(np.insert(rows, skipped, -1)).to(DEVICE)
    given_mask = np.insert(mask.numpy(), skipped, 0, axis=0)

    empty = poisoned(len(rows) + 1, dtype=torch.int32)
    found = wider(logits)
    returned = apply_bitmask(found[:, :vocab], torch.from_numpy(given_mask).to(DEVICE), given_rows, empty=empty)
    expected = logits.clone()
    expected[rows] = expected[rows].where(torch.from_numpy(allowed), -torch.inf)
    assert_edited(found, expected)
    assert returned is empty
    left = (expected[rows] > -torch.inf).any(-1).numpy()
    assert empty.tolist() == np.insert((~left).astype(int), skipped, 0).tolist()


def test_an_allowed_nan_is_not_hidden():
    logits = torch.full((2, 40), torch.nan, device=DEVICE)
    mask = packed(np.eye(2, 40, k=35, dtype=np.bool_), 2).to(DEVICE)
    assert apply_bitmask(logits, mask, torch.arange(2, device=DEVICE)).tolist() == [0, 0]
    assert logits.isnan().sum(-1).tolist() == [1, 1]
    assert logits[1, 36].isnan()
