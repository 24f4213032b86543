"""From the scheduled rows of a plan to the flat batch that the model takes: index arithmetic, no loop over rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.batch import ForwardBatch
from gpu_workers.rows import Ints, Rows, int32_columns


@dataclass(slots=True, frozen=True)
class PreparedStep:
    """The batch of one forward, and the rows whose next token is then sampled, in the order of the plan."""

    batch: Any  # ForwardBatch, or what else the backend makes of it
    sampling_rows: Ints  # [S]


@dataclass(slots=True, frozen=True)
class Flattened:
    """T tokens of B scheduled rows, in their order; see `ForwardBatch`."""

    rows: Ints  # [B]
    token_rows: Ints  # [T], the row of each token
    token_ids: Ints  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    query_starts: NDArray[np.int64]  # [B + 1]
    context_lens: NDArray[np.int64]  # [B]


def flatten(rows: Rows, columns: Ints) -> Flattened:
    """Check and flatten entries [B, 4] of `StepPlan.scheduled`. Raises `PlanError`."""
    row, start, count, sample = (np.ascontiguousarray(columns[:, i]) for i in range(4))
    rows.check_scheduled(row, start, count, sample)
    query_starts = np.zeros(len(row) + 1, dtype=np.int64)
    np.cumsum(count, out=query_starts[1:])
    positions = np.arange(query_starts[-1]) + np.repeat(start - query_starts[:-1], count)
    token_rows = np.repeat(row, count)
    block = rows.block_tables[token_rows, positions // rows.block_size].astype(np.int64)
    return Flattened(
        rows=row,
        token_rows=token_rows,
        token_ids=rows.tokens[token_rows, positions],
        positions=positions,
        slots=block * rows.block_size + positions % rows.block_size,
        query_starts=query_starts,
        context_lens=start.astype(np.int64) + count,
    )


def prepare(rows: Rows, scheduled: bytes, device: torch.device) -> PreparedStep | None:
    """Check and flatten `StepPlan.scheduled`; None when it is empty. Raises `PlanError`."""
    columns = int32_columns(scheduled, 4, "scheduled")
    if not len(columns):
        return None
    flat = flatten(rows, columns)
    widest = -(-int(flat.context_lens.max()) // rows.block_size)
    sampling = columns[:, 3] == 1
    batch = ForwardBatch(
        token_ids=torch.from_numpy(flat.token_ids.astype(np.int64)).to(device),
        positions=torch.from_numpy(flat.positions).to(device),
        slots=torch.from_numpy(flat.slots).to(device),
        query_starts=flat.query_starts.tolist(),
        context_lens=flat.context_lens.tolist(),
        block_tables=torch.from_numpy(rows.block_tables[flat.rows, :widest]).to(device),
        logits_rows=torch.from_numpy(flat.query_starts[1:][sampling] - 1).to(device),
    )
    return PreparedStep(batch, flat.rows[sampling])
