"""A rank's copy of each running request: token ids and block table, kept up to date by the differences in plans.

A row is a request's index here, from the plan that introduces it to the one that frees it. Whatever a plan says is
checked before it is used as an index: a plan that does not fit would read or overwrite another request's data.
"""

import numpy as np
from numpy.typing import NDArray

from ipc.engine_messages import NewRow, StepPlan

Ints = NDArray[np.int32]

_NONE = np.empty(0, dtype=np.int32)
UNKNOWN = -1  # a token that was sampled, but whose id only the device has


class PlanError(ValueError):
    """A plan that contradicts the state of the rows; the worker can't go on, since scheduler and rank disagree."""


def int32_columns(data: bytes, columns: int, name: str) -> Ints:
    """`data` as a read-only [n, columns] array of int32; PlanError when its length does not fit."""
    if len(data) % (4 * columns):
        raise PlanError(f"{name}: {len(data)} bytes are not whole entries of {columns} int32")
    return np.frombuffer(data, dtype="<i4").reshape(-1, columns)


def check_range(values: NDArray[np.integer], limit: int, name: str) -> None:
    """PlanError unless all values are in 0..limit - 1."""
    if values.size and (values.min() < 0 or values.max() >= limit):
        wrong = int(values[(values < 0) | (values >= limit)].flat[0])
        raise PlanError(f"{name} {wrong} is outside 0..{limit - 1}")


class Rows:
    """Token ids and block tables of up to `max_seqs` requests, `max_model_len` tokens each."""

    def __init__(self, max_seqs: int, max_model_len: int, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.max_seqs = max_seqs
        self.max_model_len = max_model_len
        self.num_pool_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        # A row that ends at the length limit is run once more in vain, as the next step was planned before its end was
        # known: that step writes one token beyond the limit.
        self.max_blocks = max_model_len // block_size + 1
        self.tokens = np.zeros((max_seqs, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(max_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_seqs, dtype=np.int64)
        self.block_tables = np.zeros((max_seqs, self.max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_seqs, dtype=np.int64)
        self.in_use = np.zeros(max_seqs, dtype=np.bool_)
        self.uses = np.zeros(max_seqs, dtype=np.int64)  # requests that have had the row
        # What has changed in the block tables since somebody, who keeps a copy of them, last looked: cells and values.
        self.table_changes: list[tuple[NDArray[np.int64], Ints]] | None = None

    def update(self, plan: StepPlan) -> Ints:
        """Free, add and extend rows, in this order; returns the rows that were freed."""
        freed = _NONE
        if plan.freed_rows:
            freed = int32_columns(plan.freed_rows, 1, "freed_rows")[:, 0]
            self._check_in_use(freed, "freed_rows")
            self.in_use[freed] = False
        for new in plan.new_rows:
            self._add(new)
        if plan.new_blocks:
            self._extend(int32_columns(plan.new_blocks, 3, "new_blocks"))
        return freed

    def _check_in_use(self, rows: Ints, name: str) -> None:
        check_range(rows, self.max_seqs, f"{name}: row")
        if not self.in_use[rows].all():
            raise PlanError(f"{name}: row {int(rows[~self.in_use[rows]][0])} is not in use")

    def _add(self, new: NewRow) -> None:
        if not 0 <= new.row < self.max_seqs:
            raise PlanError(f"new_rows: row {new.row} is outside 0..{self.max_seqs - 1}")
        if self.in_use[new.row]:
            raise PlanError(f"new_rows: row {new.row} is still in use")
        token_ids = int32_columns(new.token_ids, 1, "token_ids")[:, 0]
        block_ids = int32_columns(new.block_ids, 1, "block_ids")[:, 0]
        check_range(token_ids, self.vocab_size, f"new_rows: row {new.row}: token id")
        check_range(block_ids, self.num_pool_blocks, f"new_rows: row {new.row}: block id")
        if len(token_ids) > self.max_model_len:
            raise PlanError(f"new_rows: row {new.row} has {len(token_ids)} tokens, at most {self.max_model_len} fit")
        if not 1 <= new.num_prompt <= len(token_ids):
            raise PlanError(f"new_rows: row {new.row}: num_prompt {new.num_prompt} of {len(token_ids)} tokens")
        if len(block_ids) > self.max_blocks:
            raise PlanError(f"new_rows: row {new.row} has {len(block_ids)} blocks, at most {self.max_blocks} fit")
        self.tokens[new.row, : len(token_ids)] = token_ids
        self.num_tokens[new.row] = len(token_ids)
        self.num_prompt[new.row] = new.num_prompt
        self.block_tables[new.row, : len(block_ids)] = block_ids
        self.num_blocks[new.row] = len(block_ids)
        self.in_use[new.row] = True
        self.uses[new.row] += 1
        if self.table_changes is not None:
            self.table_changes.append((new.row * self.max_blocks + np.arange(len(block_ids)), block_ids))

    def _extend(self, entries: Ints) -> None:
        """Append to block tables; `entries` are [n, 3]: row, index in its table, block id."""
        rows, index, block_ids = entries[:, 0], entries[:, 1], entries[:, 2]
        self._check_in_use(rows, "new_blocks")
        check_range(index, self.max_blocks, "new_blocks: index")
        check_range(block_ids, self.num_pool_blocks, "new_blocks: block id")
        cells = rows.astype(np.int64) * self.max_blocks + index
        grown = self.num_blocks + np.bincount(rows, minlength=self.max_seqs)
        # With no index twice, none below the old end and none beyond the new one, there is no gap.
        if len(np.unique(cells)) < len(cells) or (index < self.num_blocks[rows]).any() or (index >= grown[rows]).any():
            raise PlanError("new_blocks: the indices do not continue their rows' block tables")
        self.block_tables[rows, index] = block_ids
        self.num_blocks[:] = grown  # in place: native code has its address
        if self.table_changes is not None:
            self.table_changes.append((cells, block_ids))

    def check_scheduled(self, rows: Ints, starts: Ints, counts: Ints, samples: Ints) -> None:
        """PlanError unless these rows' tokens are known here and their positions have blocks."""
        self._check_in_use(rows, "scheduled")
        if len(np.unique(rows)) < len(rows):
            raise PlanError("scheduled: a row occurs twice")
        ends = starts.astype(np.int64) + counts
        known = self.num_tokens[rows]
        self._require((starts >= 0) & (counts >= 1), rows, "start or count is out of range")
        self._require(ends <= known, rows, "tokens that are not known here")
        self._require(ends <= self.max_model_len, rows, f"more than {self.max_model_len} tokens")
        self._require(ends <= self.num_blocks[rows] * self.block_size, rows, "positions without a block")
        check_range(samples, 2, "scheduled: sample")
        sampling = samples == 1
        self._require(~sampling | (ends == known), rows, "a sample where a token is already known")

    @staticmethod
    def _require(valid: NDArray[np.bool_], rows: Ints, problem: str) -> None:
        if not valid.all():
            raise PlanError(f"scheduled: row {int(rows[~valid][0])}: {problem}")

    def append(self, rows: Ints, token_ids: NDArray[np.int64] | None) -> None:
        """One sampled token more at the end of each of these rows; None: not known yet, see `learn`."""
        self.tokens[rows, self.num_tokens[rows]] = UNKNOWN if token_ids is None else token_ids
        self.num_tokens[rows] += 1

    def learn(self, rows: Ints, positions: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """The tokens that were not known when they were appended."""
        self.tokens[rows, positions] = token_ids
