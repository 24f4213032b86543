"""What a step's forward reads on a GPU: its batch, the block tables and the tokens that were sampled last."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.backends.triton_transfer import Array, Upload
from gpu_workers.batch import ForwardBatch
from gpu_workers.prepare import Flattened, PreparedStep, flatten
from gpu_workers.rows import Ints, Rows, int32_columns
from kernels.gpu.embedding import input_ids

_PADDING_SLOT = -1  # nothing is written
_OF_BUCKETS = ("token_ids", "token_rows", "context_lens", "positions", "slots", "rows")  # sent for a graph's batch


@dataclass(slots=True, frozen=True)
class GpuBatch:
    """T tokens of B sequences on the device, those with one token (decodes) before those with more (prefill chunks).

    A CUDA graph's batch is filled up with sequences of no context, whose tokens are written nowhere.
    """

    token_ids: torch.Tensor  # [T] int32; negative: the row's last sampled token
    token_rows: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64
    rows: torch.Tensor  # [B] int64
    context_lens: torch.Tensor  # [B] int32
    query_starts: torch.Tensor  # [B + 1] int32: where each sequence's tokens begin
    logits_rows: torch.Tensor  # [S] int64
    sampling_rows: torch.Tensor  # [S] int64
    tables: torch.Tensor  # [max seqs, max blocks] int32, of all rows
    last_tokens: torch.Tensor  # [max seqs] int32, of all rows
    num_decodes: int
    longest_chunk: int
    max_context: int  # at least the longest
    bucket: "Bucket | None" = None  # of the graph that computes it
    order: NDArray[np.int64] | None = None  # [T] where each of the plan's tokens is in the batch; None: as they come
    # Once `with_tables` has made them:
    block_tables: torch.Tensor | None = None  # [B, blocks] int32
    chunk_starts: torch.Tensor | None = None  # [B - decodes + 1] int32: where chunks begin, from the first of them

    @classmethod
    def of(cls, batch: ForwardBatch, device: torch.device) -> "GpuBatch":
        """Of a batch that was not made for a runner."""
        lengths = np.diff(batch.query_starts)
        count = len(lengths)
        return cls(
            token_ids=batch.token_ids.to(device, torch.int32),
            token_rows=torch.zeros(len(batch.token_ids), dtype=torch.int32, device=device),
            positions=batch.positions.to(device),
            slots=batch.slots.to(device),
            rows=torch.arange(count, device=device),
            context_lens=torch.tensor(batch.context_lens, dtype=torch.int32, device=device),
            query_starts=torch.tensor(batch.query_starts, dtype=torch.int32, device=device),
            logits_rows=batch.logits_rows.to(device),
            sampling_rows=torch.arange(count, device=device),
            tables=batch.block_tables.to(device),
            last_tokens=torch.zeros(count, dtype=torch.int32, device=device),
            num_decodes=0,
            longest_chunk=int(lengths.max()),
            max_context=max(batch.context_lens),
        )

    def with_tables(self, block_size: int) -> "GpuBatch":
        """With what all layers share; made on the device, so that a graph does it anew each time."""
        width = min(self.max_context // block_size + 1, self.tables.shape[1])
        block_tables = self.tables[:, :width].index_select(0, self.rows)
        return replace(
            self, block_tables=block_tables, chunk_starts=self.query_starts[self.num_decodes :] - self.num_decodes
        )

    def input_ids(self) -> torch.Tensor:
        """[T] int32, all known."""
        return input_ids(self.token_ids, self.token_rows, self.last_tokens, torch.empty_like(self.token_ids))

    def places(self, token_rows: NDArray[np.int64]) -> torch.Tensor:
        """[R] int64: where flat tokens of the plan are in the batch."""
        places = token_rows if self.order is None else self.order[token_rows]
        return torch.from_numpy(places).to(self.token_ids.device)


@dataclass(slots=True, frozen=True)
class Bucket:
    """The decode batches that one CUDA graph computes: of up to so many sequences, each of at most so many tokens."""

    sequences: int
    max_context: int


class StepInputs:
    """Fills the device's memory for each step of one runner, whose `rows` these are."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.rows = rows
        self._upload = Upload(device)
        self._table_upload = Upload(device)
        self._tables = torch.from_numpy(rows.block_tables).to(device, copy=True)
        rows.table_changes = []
        self._last_tokens = torch.zeros(rows.max_seqs, dtype=torch.int32, device=device)
        self._device = device
        self._graph_upload: Upload | None = None
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._starts = torch.empty(0, dtype=torch.int32)
        self._buckets: Sequence[Bucket] = ()

    def use_graphs(self, buckets: Sequence[Bucket]) -> None:
        """From now on, decode batches that fit one of `buckets`, the smallest first, are filled up to it."""
        largest = max(bucket.sequences for bucket in buckets)
        # Of each sequence 3 int32 and 3 int64, in six arrays.
        self._graph_upload = Upload(self._device, fixed_bytes=largest * 36 + 6 * 16)
        self._numbers = torch.arange(largest, device=self._device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=self._device)
        self._buckets = buckets

    def prepare(self, scheduled: bytes) -> PreparedStep | None:
        """Check a plan's rows, and start to copy what is new; raises `PlanError`."""
        columns = int32_columns(scheduled, 4, "scheduled")
        self._update_tables()
        if not len(columns):
            return None
        order = np.argsort(columns[:, 2] > 1, kind="stable")
        in_order = bool((order[1:] > order[:-1]).all())
        flat = flatten(self.rows, columns if in_order else columns[order])
        samples = columns[:, 3] == 1
        sampling_rows = columns[samples, 0]
        num_decodes = int((columns[:, 2] == 1).sum())
        longest = int(flat.context_lens.max())
        if num_decodes == len(columns) and samples.all():
            bucket = self._bucket(num_decodes, longest)
            if bucket is not None:
                return PreparedStep(self._fill_bucket(flat, bucket), sampling_rows)
        last_tokens = np.empty(len(columns), dtype=np.int64)
        last_tokens[order] = flat.query_starts[1:] - 1
        fields = self._on_device(
            self._upload,
            {
                "token_ids": flat.token_ids,
                "token_rows": flat.token_rows,
                "positions": flat.positions,
                "slots": flat.slots,
                "rows": flat.rows.astype(np.int64),
                "context_lens": flat.context_lens.astype(np.int32),
                "query_starts": flat.query_starts.astype(np.int32),
                "logits_rows": last_tokens[samples],
                "sampling_rows": sampling_rows.astype(np.int64),
            },
        )
        batch = GpuBatch(
            **fields,
            num_decodes=num_decodes,
            longest_chunk=int(columns[:, 2].max()) if num_decodes < len(columns) else 0,
            max_context=longest,
            order=None if in_order else _places(columns[:, 2], order),
        )
        return PreparedStep(batch, sampling_rows)

    def _update_tables(self) -> None:
        changes, self.rows.table_changes = self.rows.table_changes, []
        if changes:
            cells, block_ids = self._table_upload.send(
                [np.concatenate([cells for cells, _ in changes]), np.concatenate([ids for _, ids in changes])]
            )
            self._tables.view(-1).index_copy_(0, cells, block_ids)

    def _bucket(self, sequences: int, context: int) -> Bucket | None:
        for bucket in self._buckets:
            if sequences <= bucket.sequences and context <= bucket.max_context:
                return bucket
        return None

    def _fill_bucket(self, flat: Flattened, bucket: Bucket) -> GpuBatch:
        missing = bucket.sequences - len(flat.rows)
        arrays = (
            (flat.token_ids, 0),
            (flat.token_rows, 0),
            (flat.context_lens.astype(np.int32), 0),
            (flat.positions, 0),
            (flat.slots, _PADDING_SLOT),
            (flat.rows.astype(np.int64), 0),
        )
        padded = [np.pad(array, (0, missing), constant_values=fill) for array, fill in arrays]
        return self._bucket_batch(padded, bucket, len(flat.rows))

    def empty_batch(self, bucket: Bucket) -> GpuBatch:
        """A batch of padding alone, at the addresses that all batches of `bucket` have."""
        nothing = np.zeros(bucket.sequences, dtype=np.int64)
        less = nothing.astype(np.int32)
        return self._bucket_batch([less, less, less, nothing, nothing + _PADDING_SLOT, nothing], bucket, 0)

    def _bucket_batch(self, arrays: Sequence[Array], bucket: Bucket, sequences: int) -> GpuBatch:
        assert self._graph_upload is not None
        fields = self._on_device(self._graph_upload, dict(zip(_OF_BUCKETS, arrays, strict=True)))
        return GpuBatch(
            **fields,
            query_starts=self._starts[: bucket.sequences + 1],
            logits_rows=self._numbers[: bucket.sequences],  # in a graph all of them, padding too
            sampling_rows=fields["rows"][:sequences],
            num_decodes=bucket.sequences,
            longest_chunk=0,
            max_context=bucket.max_context,
            bucket=bucket,
        )

    def _on_device(self, upload: Upload, arrays: dict[str, Array]) -> dict[str, Any]:
        """These fields of a batch, sent, and those that all batches share."""
        sent = dict(zip(arrays, upload.send(list(arrays.values())), strict=True))
        return sent | {"tables": self._tables, "last_tokens": self._last_tokens}


def _places(counts: Ints, order: NDArray[np.intp]) -> NDArray[np.int64]:
    """Where the tokens of entries with these counts, one after the other, are once the entries stand in `order`."""
    begins = np.empty(len(counts), dtype=np.int64)
    begins[order] = np.cumsum(counts[order]) - counts[order]
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
