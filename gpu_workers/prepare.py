"""From the scheduled rows of a plan to the flat batch that the model takes: index arithmetic, no loop over rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_workers.batch import ForwardBatch
from gpu_workers.rows import Ints, Rows, int32_columns


@dataclass(slots=True, frozen=True)
class PreparedStep:
    """The batch of one forward, and the rows whose next token is then sampled, in the order of the plan."""

    batch: Any  # ForwardBatch, or what else the backend makes of it
    sampling_rows: Ints  # [S]


def prepare(rows: Rows, scheduled: bytes, device: torch.device) -> PreparedStep | None:
    """Check and flatten `StepPlan.scheduled`; None when it is empty. Raises `PlanError`."""
    columns = int32_columns(scheduled, 4, "scheduled")
    if not len(columns):
        return None
    row, start, count, sample = (np.ascontiguousarray(columns[:, i]) for i in range(4))
    rows.check_scheduled(row, start, count, sample)

    ends = start.astype(np.int64) + count
    query_starts = np.zeros(len(row) + 1, dtype=np.int64)
    np.cumsum(count, out=query_starts[1:])
    positions = np.arange(query_starts[-1]) + np.repeat(start - query_starts[:-1], count)
    token_rows = np.repeat(row, count)
    block = rows.block_tables[token_rows, positions // rows.block_size].astype(np.int64)
    slots = block * rows.block_size + positions % rows.block_size
    widest = -(-int(ends.max()) // rows.block_size)
    sampling = sample == 1

    batch = ForwardBatch(
        token_ids=torch.from_numpy(rows.tokens[token_rows, positions].astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        query_starts=query_starts.tolist(),
        context_lens=ends.tolist(),
        block_tables=torch.from_numpy(rows.block_tables[row, :widest]).to(device),
        logits_rows=torch.from_numpy(query_starts[1:][sampling] - 1).to(device),
    )
    return PreparedStep(batch, row[sampling])
