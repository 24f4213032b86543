"""Copies of KV blocks between the pool and the host tier, beside the forward of the plan that asks for them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from gpu_workers.backend import Backend
from gpu_workers.rows import Ints, PlanError, check_range, int32_columns
from ipc.engine_messages import StepPlan


class BlockCopier:
    """Copies on one thread of its own between `kv`, of `num_blocks` blocks, and `host_kv`, of `num_host_blocks`."""

    def __init__(self, backend: Backend, kv: Any, num_blocks: int, host_kv: Any, num_host_blocks: int) -> None:
        self._backend = backend
        self._kv = kv
        self._num_blocks = num_blocks
        self._host_kv = host_kv
        self._num_host_blocks = num_host_blocks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="block-copier")

    def start(self, plan: StepPlan) -> Callable[[], None]:
        """Start the plan's copies; what is returned waits for them, and raises whatever a copy raised.

        To be called before the plan's forward is launched, and after the copies before were waited for. Raises
        `PlanError` before it starts any.
        """
        if not plan.copies_out and not plan.copies_in:
            return _nothing
        copies_out = int32_columns(plan.copies_out, 2, "copies_out")
        copies_in = int32_columns(plan.copies_in, 2, "copies_in")
        self._check(copies_out, copies_in)
        self._backend.begin_copies(self._host_kv)
        return self._thread.submit(self._copy, copies_out, copies_in).result

    def _check(self, copies_out: Ints, copies_in: Ints) -> None:
        """Each block that is written is named once: outs and ins may then run in any order."""
        check_range(copies_out[:, 0], self._num_blocks, "copies_out: block id")
        check_range(copies_out[:, 1], self._num_host_blocks, "copies_out: host block id")
        check_range(copies_in[:, 0], self._num_host_blocks, "copies_in: host block id")
        check_range(copies_in[:, 1], self._num_blocks, "copies_in: block id")
        _check_written(copies_out[:, 1], copies_in[:, 0], "copies_out: host block id")
        _check_written(copies_in[:, 1], copies_out[:, 0], "copies_in: block id")

    def _copy(self, copies_out: Ints, copies_in: Ints) -> None:
        if len(copies_out):
            self._backend.copy_blocks_out(self._kv, self._host_kv, torch.from_numpy(copies_out.astype(np.int64)))
        if len(copies_in):
            self._backend.copy_blocks_in(self._kv, self._host_kv, torch.from_numpy(copies_in.astype(np.int64)))


def _nothing() -> None:
    """Of a plan without copies."""


def _check_written(written: Ints, read: Ints, name: str) -> None:
    """PlanError when a block is written twice, or read as well."""
    ids, counts = np.unique(written, return_counts=True)
    if (counts > 1).any():
        raise PlanError(f"{name} {int(ids[counts > 1][0])} is written twice")
    both = np.intersect1d(ids, read)
    if len(both):
        raise PlanError(f"{name} {int(both[0])} is written and read in one plan")
