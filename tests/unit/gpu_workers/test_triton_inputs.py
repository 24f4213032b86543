"""What a GPU is told of each step: the same batches as on a CPU, in memory that stays where it is."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_workers.backends.triton_inputs import Bucket, GpuBatch, StepInputs
from gpu_workers.backends.triton_transfer import Download, Upload
from gpu_workers.prepare import prepare
from gpu_workers.rows import Rows
from ipc.codec import pack_ints
from tests.unit.gpu_workers.plans import new_row, plan

CPU = torch.device("cpu")
ARRAYS = st.lists(
    st.tuples(st.sampled_from([np.int32, np.int64, np.float32, np.float64, np.uint8]), st.integers(0, 40)), max_size=6
)


@settings(max_examples=30)
@given(st.lists(ARRAYS, min_size=1, max_size=4), st.booleans())
def test_arrays_arrive_whole(sends: list[list[tuple[Any, int]]], two_axes: bool) -> None:
    upload, download = Upload(CPU), Download(CPU)
    random = np.random.default_rng(1)
    for kinds in sends:
        arrays = [random.integers(0, 200, size=(size, 2) if two_axes else size).astype(kind) for kind, size in kinds]
        sent = upload.send(arrays)
        for array, there in zip(arrays, sent, strict=True):
            assert there.data_ptr() % 16 == 0
            np.testing.assert_array_equal(there.numpy(), array, strict=True)
        for array, here in zip(arrays, download.start(sent).wait(), strict=True):
            np.testing.assert_array_equal(here, array, strict=True)


def test_what_two_steps_download_is_kept_apart() -> None:
    download = Download(CPU)
    first = download.start([torch.arange(5)])
    second = download.start([torch.arange(5) + 10])
    assert first.wait()[0].tolist() == [0, 1, 2, 3, 4]
    assert second.wait()[0].tolist() == [10, 11, 12, 13, 14]


def test_a_fixed_upload_stays_where_it_is_and_refuses_more() -> None:
    upload = Upload(CPU, fixed_bytes=64)
    places = {upload.send([np.zeros(4, dtype=np.int64), np.ones(4, dtype=np.int32)])[1].data_ptr() for _ in range(3)}
    assert len(places) == 1
    with pytest.raises(ValueError, match="80 bytes do not fit into the 64"):
        upload.send([np.zeros(10, dtype=np.int64)])


class Started:
    """Rows with prompts in their blocks, and the inputs made from them."""

    def __init__(self, prompts: dict[int, list[int]], block_size: int = 4, max_seqs: int = 4) -> None:
        self.rows = Rows(max_seqs, 64, 200, block_size, 101)
        self.inputs = StepInputs(self.rows, CPU)
        self.blocks = iter(np.random.default_rng(0).permutation(200).tolist())
        new = [
            new_row(row, prompt, [next(self.blocks) for _ in range(-(-(len(prompt) + 9) // block_size))])
            for row, prompt in prompts.items()
        ]
        self.rows.update(plan(0, new=new))


@settings(max_examples=40)
@given(st.data())
def test_batches_are_those_of_the_cpu_with_decodes_first(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    prompts = {row: [(7 * row + at) % 101 for at in range(length)] for row, length in enumerate(lengths)}
    started = Started(prompts)
    chosen = data.draw(st.permutations(range(len(lengths))))
    entries = []
    for row in chosen:
        start = data.draw(st.integers(0, lengths[row] - 1))
        count = data.draw(st.one_of(st.just(1), st.integers(1, lengths[row] - start)))
        entries.append((row, start, count, int(start + count == lengths[row] and data.draw(st.booleans()))))
    scheduled = pack_ints(value for entry in entries for value in entry)
    expected = prepare(started.rows, scheduled, CPU)
    found = started.inputs.prepare(scheduled)
    assert expected is not None
    assert found is not None
    np.testing.assert_array_equal(found.sampling_rows, expected.sampling_rows)
    batch: GpuBatch = found.batch.with_tables(4)
    counts = [entry[2] for entry in entries]
    assert batch.num_decodes == counts.count(1)
    assert batch.longest_chunk == max([count for count in counts if count > 1], default=0)
    assert batch.max_context == max(expected.batch.context_lens)
    # Token by token, through the map from the plan's order.
    places = batch.places(np.arange(sum(counts)))
    assert sorted(places.tolist()) == list(range(sum(counts)))
    for name in ("token_ids", "positions", "slots"):
        assert getattr(batch, name)[places].tolist() == getattr(expected.batch, name).tolist()
    assert batch.token_rows[places].tolist() == np.repeat([entry[0] for entry in entries], counts).tolist()
    assert batch.logits_rows.tolist() == places[expected.batch.logits_rows].tolist()
    assert batch.sampling_rows.tolist() == expected.sampling_rows.tolist()
    # Sequence by sequence.
    starts = batch.query_starts.tolist()
    assert batch.block_tables is not None
    for at, row in enumerate(batch.rows.tolist()):
        entry = next(entry for entry in entries if entry[0] == row)
        assert starts[at + 1] - starts[at] == entry[2]
        assert int(batch.context_lens[at]) == entry[1] + entry[2]
        blocks = -(-(entry[1] + entry[2]) // 4)
        assert batch.block_tables[at, :blocks].tolist() == started.rows.block_tables[row, :blocks].tolist()
    assert (batch.token_rows[starts[:-1]] == batch.rows).all()


def test_tables_follow_the_rows() -> None:
    started = Started({0: [1, 2, 3], 2: [4] * 9})
    rows, inputs = started.rows, started.inputs
    inputs.prepare(pack_ints([0, 0, 3, 1]))
    rows.update(plan(1, blocks=[(0, 3, 150), (2, 5, 151), (0, 4, 152)]))
    rows.update(plan(2, freed=[2], new=[new_row(2, [5, 6], [160, 161])]))
    batch = inputs.prepare(pack_ints([0, 0, 3, 1, 2, 0, 2, 1])).batch
    for row, count in ((0, 5), (2, 2)):
        assert batch.tables[row, :count].tolist() == rows.block_tables[row, :count].tolist()


def test_tokens_that_only_the_device_knows_are_taken_there() -> None:
    started = Started({0: [1, 2, 3], 1: [7]})
    started.rows.append(np.array([0], dtype=np.int32), None)
    batch = started.inputs.prepare(pack_ints([0, 2, 2, 1, 1, 0, 1, 1])).batch
    batch.last_tokens[0] = 55
    batch.last_tokens[1] = 66  # not asked for: the host knows that token
    assert batch.input_ids()[batch.places(np.arange(3))].tolist() == [3, 55, 7]


def test_decodes_fill_the_smallest_bucket_and_stay_where_they_are() -> None:
    started = Started({row: [row + 1] * (5 + row) for row in range(3)})
    started.inputs.use_graphs([Bucket(1, 8), Bucket(1, 64), Bucket(2, 8), Bucket(2, 64), Bucket(4, 8), Bucket(4, 64)])
    rows = np.arange(3, dtype=np.int32)
    started.rows.append(rows, np.array([11, 12, 13]))
    empty = started.inputs.empty_batch(Bucket(4, 8))
    found = started.inputs.prepare(pack_ints([0, 5, 1, 1, 1, 6, 1, 1, 2, 7, 1, 1]))
    batch = found.batch
    assert batch.bucket == Bucket(4, 8)
    assert batch.token_ids.tolist() == [11, 12, 13, 0]
    assert batch.context_lens.tolist() == [6, 7, 8, 0]
    assert batch.slots[3] == -1
    assert batch.sampling_rows.tolist() == found.sampling_rows.tolist() == [0, 1, 2]
    for name in ("token_ids", "token_rows", "positions", "slots", "rows", "context_lens", "query_starts"):
        assert getattr(batch, name).data_ptr() == getattr(empty, name).data_ptr()
    # Longer than the bucket of 8 positions, no sample, or more than decodes: another bucket, or none.
    started.rows.append(rows, np.array([14, 15, 16]))
    assert started.inputs.prepare(pack_ints([2, 8, 1, 1])).batch.bucket == Bucket(1, 64)
    assert started.inputs.prepare(pack_ints([2, 8, 1, 0])).batch.bucket is None
    assert started.inputs.prepare(pack_ints([2, 7, 2, 1])).batch.bucket is None
