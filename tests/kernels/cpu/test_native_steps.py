"""What native code does around a forward: the flat batch of a plan, and the best ids in place of logits."""

import ctypes
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_workers.backends.native_cpu import NativeCpuBackend
from gpu_workers.prepare import prepare
from gpu_workers.rows import PlanError, Rows
from ipc.codec import pack_ints
from kernels.cpu.library import Step

from .recorded import Recorded, batch_of, linear, rms_norm
from .test_native_ops import random_weight

EXAMPLES = settings(max_examples=settings.default.max_examples, deadline=None)
MAX_SEQS, MAX_LEN, BLOCK_SIZE, NUM_BLOCKS = 5, 30, 4, 50


@pytest.fixture(autouse=True)
def compiled(library: ctypes.CDLL) -> Iterator[None]:
    """Skips where there are no native kernels; leaves torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@st.composite
def known_rows(draw: st.DrawFn) -> Rows:
    """Some in use, with room for all of their tokens or for less."""
    rows = Rows(MAX_SEQS, MAX_LEN, NUM_BLOCKS, BLOCK_SIZE, 1000)
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    rows.tokens[:] = random.integers(0, 1000, rows.tokens.shape)
    rows.block_tables[:] = random.integers(0, NUM_BLOCKS, rows.block_tables.shape)
    for row in range(MAX_SEQS):
        rows.in_use[row] = draw(st.sampled_from([True, True, True, False]))
        rows.num_tokens[row] = draw(st.integers(1, MAX_LEN + 1))
        needed = -(-int(rows.num_tokens[row]) // BLOCK_SIZE)
        rows.num_blocks[row] = min(rows.max_blocks, max(0, needed + draw(st.sampled_from([0, 0, 0, 1, -1]))))
    return rows


@st.composite
def plans(draw: st.DrawFn, rows: Rows) -> list[tuple[int, int, int, int]]:
    """Mostly valid entries, in any order."""
    entries = []
    for row in draw(st.lists(st.integers(0, MAX_SEQS - 1), max_size=MAX_SEQS, unique=True)):
        known = int(rows.num_tokens[row])
        start = draw(st.integers(0, known - 1))
        count = draw(st.sampled_from([known - start, known - start, draw(st.integers(1, known - start))]))
        entries.append([row, start, count, int(start + count == known and draw(st.booleans()))])
    if entries and draw(st.integers(0, 3)) == 0:
        entry = draw(st.sampled_from(entries))
        entry[draw(st.integers(0, 3))] += draw(st.sampled_from([-1, 1, 5, -(1 << 31) + 100, (1 << 31) - 100]))
    if entries and draw(st.integers(0, 9)) == 0:
        entries.append(list(entries[0]))
    return [tuple(max(-(1 << 31), min(value, (1 << 31) - 1)) for value in entry) for entry in entries]


def array(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address)) if count else []


@EXAMPLES
@given(data=st.data())
def test_flat_batches_are_those_that_numpy_makes(data: st.DataObject) -> None:
    """And plans that do not fit the rows are refused in the same words."""
    backend, rows = NativeCpuBackend(torch.float32, 1, quantized=True), data.draw(known_rows())
    for _ in range(2):  # the second into the memory of the first
        scheduled = pack_ints(value for entry in data.draw(plans(rows)) for value in entry)
        try:
            expected = prepare(rows, scheduled, torch.device("cpu"))
        except PlanError as error:
            with pytest.raises(PlanError, match=f"^{re.escape(str(error))}$"):
                backend.prepare(rows, scheduled)
            continue
        actual = backend.prepare(rows, scheduled)
        if expected is None:
            assert actual is None
            continue
        batch, step = expected.batch, actual.batch
        assert isinstance(step, Step)
        assert (step.tokens, step.sequences) == (len(batch.token_ids), len(batch.context_lens))
        assert (step.rows, step.table_width) == (len(batch.logits_rows), rows.max_blocks)
        assert array(step.token_ids, step.tokens) == batch.token_ids.tolist()
        assert array(step.positions, step.tokens) == batch.positions.tolist()
        assert array(step.slots, step.tokens) == batch.slots.tolist()
        assert array(step.query_starts, step.sequences + 1) == batch.query_starts
        assert array(step.context_lens, step.sequences) == batch.context_lens
        assert array(step.logits_rows, step.rows) == batch.logits_rows.tolist()
        assert actual.sampling_rows.tolist() == expected.sampling_rows.tolist()
        tables = rows.block_tables[array(step.table_rows, step.sequences)]
        assert step.block_tables == rows.block_tables.ctypes.data
        assert np.array_equal(tables[:, : batch.block_tables.shape[1]], batch.block_tables.numpy())


@pytest.mark.parametrize("size", [1, 15, 17])
def test_half_an_entry_is_refused(size: int) -> None:
    rows = Rows(MAX_SEQS, MAX_LEN, NUM_BLOCKS, BLOCK_SIZE, 1000)
    with pytest.raises(PlanError, match=f"^scheduled: {size} bytes are not whole entries of 4 int32$"):
        NativeCpuBackend(torch.float32, 1, quantized=True).prepare(rows, bytes(size))


@EXAMPLES
@given(
    vocabulary=st.integers(1, 70) | st.integers(1, 700),
    rows=st.integers(1, 5) | st.integers(1, 60),
    threads=st.integers(1, 3),
    values=st.sampled_from([[0.0], [0.0, -0.0, 1.0], [-np.inf, 3.0], [-np.inf], [np.inf, -np.inf, 0.0], None]),
    seed=st.integers(0, 1 << 30),
)
def test_best_ids_are_those_of_the_logits(
    vocabulary: int, rows: int, threads: int, values: list[float] | None, seed: int
) -> None:
    """numpy's argmax of the same logits; ties and infinite ones, too. The bias of the unit matrix puts them there."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((1, vocabulary)) if values is None else random.choice(values, (1, vocabulary))
    inputs = torch.zeros(rows, 8)
    recorded = with_logits(inputs, torch.from_numpy(logits[0]).float(), threads)
    batch = batch_of(torch.arange(rows))
    seen = recorded.run(batch).numpy()
    assert np.array_equal(seen, np.repeat(logits.astype(np.float32), rows, axis=0))
    assert recorded.best_ids(batch).tolist() == seen.argmax(axis=-1).tolist()


@EXAMPLES
@given(
    vocabulary=st.integers(1, 300),
    rows=st.integers(1, 60),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
    with_nan=st.booleans(),
)
def test_each_row_has_its_own_best_id(vocabulary: int, rows: int, threads: int, seed: int, with_nan: bool) -> None:
    """The rows of the input table, as logits; one NaN anywhere is an error."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randint(-9, 10, (rows, vocabulary), generator=random).float()
    if with_nan:
        inputs[seed % rows, seed % vocabulary] = torch.nan
    recorded = Recorded(inputs, lambda backend: lambda x, batch, kv: x, vocabulary, threads)
    batch = batch_of(torch.arange(rows))
    if with_nan:
        with pytest.raises(FloatingPointError, match="NaN"):
            recorded.best_ids(batch)
    else:
        assert recorded.best_ids(batch).tolist() == inputs.numpy().argmax(axis=-1).tolist()


@EXAMPLES
@given(
    kind=st.sampled_from(["int4", "int8", "bfloat16"]),
    vocabulary=st.integers(1, 200),
    rows=st.integers(1, 30),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_best_ids_of_packed_heads(kind: str, vocabulary: int, rows: int, threads: int, seed: int) -> None:
    """Those of the logits that the same head gives."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 64, generator=random).bfloat16().float()
    head = random_weight(kind, vocabulary, 64, random)
    recorded = Recorded(inputs, rms_norm(torch.ones(64), 1e-5), 64, threads, head=(head, None))
    batch = batch_of(torch.arange(rows))
    assert recorded.best_ids(batch).tolist() == recorded.run(batch).numpy().argmax(axis=-1).tolist()


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_codes_that_nobody_has_written_are_not_read(kind: str) -> None:
    weight = random_weight(kind, 8, 64, torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="what a norm, an MLP or attention gives"):
        Recorded(torch.ones(1, 64), linear(weight), 8).rows(torch.arange(1))


def test_nothing_is_sampled_where_no_row_asks_for_it() -> None:
    recorded = Recorded(torch.ones(3, 8), lambda backend: lambda x, batch, kv: x, 8)
    assert recorded.best_ids(batch_of(torch.arange(3), torch.arange(0))).tolist() == []


def with_logits(inputs: torch.Tensor, logits: torch.Tensor, threads: int) -> Recorded:
    """The same logits for every row, as the bias of a head of zeros."""
    head = torch.zeros(len(logits), inputs.shape[1])
    return Recorded(inputs, lambda backend: lambda x, batch, kv: x, inputs.shape[1], threads, head=(head, logits))
