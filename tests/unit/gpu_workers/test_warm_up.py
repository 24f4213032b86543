"""Warm-up steps fit whatever runner, pool and context there is, and reach the sizes that they are for."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import LocalComm
from gpu_workers.prompt_scores import token_scores
from gpu_workers.runner import Runner
from gpu_workers.warm_up import WarmUp
from tests.unit.gpu_workers.plans import LogitsModel, plain_backend


class Sized(LogitsModel):
    """Notes the lengths of each forward's queries and contexts."""

    def __init__(self) -> None:
        self.backend = plain_backend()
        self.backend.score = token_scores
        self.backend.fetch = lambda tensors: lambda: [tensor.numpy() for tensor in tensors]
        self.arch = type("Arch", (), {"vocab_size": 7})
        self.seen: list[list[tuple[int, int]]] = []

    def forward(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        counts = np.diff(batch.query_starts).tolist()
        self.seen.append(list(zip(counts, batch.context_lens, strict=True)))
        return torch.zeros(len(batch.logits_rows), 7)

    def more_logits(self, token_rows: np.ndarray) -> torch.Tensor:
        return torch.zeros(len(token_rows), 7)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 150),
    max_seqs=st.integers(1, 20),
    max_model_len=st.integers(1, 300),
    num_blocks=st.integers(1, 30),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_steps_of_all_sizes_that_there_is_room_for(
    tokens: int, max_seqs: int, max_model_len: int, num_blocks: int, block_size: int
) -> None:
    model = Sized()

    def make_runner(rows: int) -> Runner:
        return Runner(model, None, num_blocks, block_size, rows, max_model_len, LocalComm())

    warm_up = WarmUp(
        make_runner, max_seqs=max_seqs, max_model_len=max_model_len, num_blocks=num_blocks, block_size=block_size
    )
    longest = min(max_model_len, num_blocks * block_size)
    warm_up.largest_step(tokens)
    if longest == 1:  # no room for a prompt and a token after it
        assert model.seen == []
        return
    prefill, decode = model.seen
    chunk = min(tokens, longest - 1)
    assert prefill == [(chunk, chunk)] * min(tokens // chunk, max_seqs)
    assert decode == [(1, chunk + 1)] * len(prefill)

    model.seen.clear()
    warm_up.compile_kernels(tokens)
    alone = {step[0] for step in model.seen if len(step) == 1}
    assert {(chunk, chunk), (chunk, longest - 1), (1, 1), (1, longest - 1)} <= alone
    assert max(len(step) for step in model.seen) == max(min(max_seqs, tokens), 2)
    assert max(context for step in model.seen for _, context in step) == longest
