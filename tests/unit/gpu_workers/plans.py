"""Hand-made plans, and a small model whose next token is known, for the tests of the runner."""

from types import SimpleNamespace

import numpy as np
import torch

from gpu_workers.batch import ForwardBatch
from gpu_workers.clock import HostClock
from gpu_workers.drawn import Drawn, Known, Logprobs, Tokens
from gpu_workers.prepare import prepare
from gpu_workers.rows import UNKNOWN, Ints, int32_columns
from gpu_workers.sampling import argmax, sample
from ipc.codec import pack_floats, pack_ints
from ipc.engine_messages import NewRow, SamplingSpec, StepPlan


def spec(**changes) -> SamplingSpec:
    """Greedy, with everything off, but for `changes`; `bias` and `banned` are given as a dict and a list."""
    bias = changes.pop("bias", {})
    values = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "bias_ids": pack_ints(bias),
        "bias_values": pack_floats(bias.values()),
        "min_tokens": 0,
        "banned_ids": pack_ints(changes.pop("banned", [])),
        "logprobs": -1,
    }
    return SamplingSpec(**(values | changes))


def new_row(
    row: int, token_ids, block_ids, *, num_prompt: int | None = None, sampling=None, num_scored: int = 0
) -> NewRow:
    return NewRow(
        row=row,
        token_ids=pack_ints(token_ids),
        num_prompt=len(token_ids) if num_prompt is None else num_prompt,
        block_ids=pack_ints(block_ids),
        sampling=sampling or spec(),
        num_scored=num_scored,
    )


def plan(step: int, scheduled=(), *, new=(), freed=(), blocks=(), outs=(), ins=()) -> StepPlan:
    """`scheduled`: (row, start, count, sample); `blocks`: (row, index, block id).

    Copies are `outs`: (block id, host block id) and `ins`: (host block id, block id).
    """
    return StepPlan(
        step=step,
        new_rows=tuple(new),
        freed_rows=pack_ints(freed),
        new_blocks=pack_ints(value for entry in blocks for value in entry),
        scheduled=pack_ints(value for entry in scheduled for value in entry),
        copies_out=pack_ints(value for pair in outs for value in pair),
        copies_in=pack_ints(value for pair in ins for value in pair),
    )


def plain_backend() -> SimpleNamespace:
    """What the runner needs of a backend."""
    device = torch.device("cpu")

    def draw(logits, batch, settings, mask=None) -> Known:
        return Known(argmax(logits)) if settings is None else Known(*sample(logits, settings, mask))

    return SimpleNamespace(
        device=device,
        overlaps=False,
        clock=HostClock(),
        prepare=lambda rows, scheduled: prepare(rows, scheduled, device),
        begin_copies=lambda host_kv: None,
        draw=draw,
    )


class Late(Drawn):
    """Known to the device, and to the host only when it asks a second time."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._asked = False

    def ready(self) -> bool:
        before, self._asked = self._asked, True
        return before

    def result(self) -> tuple[Tokens, Logprobs]:
        return self._known.result()


def overlapping_backend() -> SimpleNamespace:
    """The same of a device that keeps the tokens it samples, which the host may learn later."""
    last_tokens: dict[int, int] = {}
    current: dict[str, Ints] = {}

    def prepare_with_last(rows, scheduled):
        prepared = prepare(rows, scheduled, torch.device("cpu"))
        if prepared is None:
            return None
        columns = int32_columns(scheduled, 4, "scheduled")
        owners = np.repeat(columns[:, 0], columns[:, 2])
        ids = prepared.batch.token_ids
        for at in torch.nonzero(ids == UNKNOWN)[:, 0].tolist():
            ids[at] = last_tokens[int(owners[at])]
        current["rows"] = prepared.sampling_rows
        return prepared

    def draw(logits, batch, settings, mask=None) -> Late:
        ids, logprobs = (argmax(logits), ()) if settings is None else sample(logits, settings, mask)
        last_tokens.update(zip(current["rows"].tolist(), ids.tolist(), strict=True))
        return Late(Known(ids, logprobs))

    return SimpleNamespace(
        device=torch.device("cpu"), overlaps=True, clock=HostClock(), prepare=prepare_with_last, draw=draw
    )


class LogitsModel:
    """A model that has nothing faster for greedy rows, and of which nobody wants prompts scored or embeddings."""

    def best_ids(self, batch: ForwardBatch, kv: torch.Tensor) -> np.ndarray:
        return argmax(self.forward(batch, kv))

    def more_logits(self, token_rows: np.ndarray) -> torch.Tensor:
        raise AssertionError("no plan for this model asks for prompt log-probabilities")

    def hidden_states(self, token_rows: np.ndarray) -> torch.Tensor:
        raise AssertionError("no plan for this model asks for embeddings")


class HashModel(LogitsModel):
    """Keeps token ids in its KV pool and gives logits that depend on all of a sequence's tokens and their order.

    Whatever goes wrong in slots, block tables or token buffers changes them; `logits_of` computes them from the plain
    sequence.
    """

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int) -> None:
        self.arch = SimpleNamespace(vocab_size=vocab_size)
        self.backend = plain_backend()
        self.block_size = block_size
        self.kv = torch.full((num_blocks * block_size,), -1, dtype=torch.int64)
        self.batches: list[ForwardBatch] = []

    def logits_of(self, token_ids) -> torch.Tensor:
        state = 17
        for token_id in token_ids:
            state = (state * 6364136223846793005 + int(token_id) + 1442695040888963407) % (1 << 64)
        values = np.random.Generator(np.random.PCG64(state)).normal(scale=3, size=self.arch.vocab_size)
        return torch.from_numpy(values.astype(np.float32))

    def forward(self, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        self.batches.append(batch)
        kv[batch.slots] = batch.token_ids
        logits = torch.empty(len(batch.logits_rows), self.arch.vocab_size)
        for i, flat in enumerate(batch.logits_rows.tolist()):
            sequence = next(j for j, end in enumerate(batch.query_starts[1:]) if flat < end)
            length = int(batch.positions[flat]) + 1
            assert length == batch.context_lens[sequence] - (batch.query_starts[sequence + 1] - 1 - flat)
            positions = torch.arange(length)
            blocks = batch.block_tables[sequence].long()[positions // self.block_size]
            logits[i] = self.logits_of(kv[blocks * self.block_size + positions % self.block_size])
        return logits
