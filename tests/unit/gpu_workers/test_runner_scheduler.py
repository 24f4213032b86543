"""The scheduler's own plans, carried out by the runner: each request gets the tokens that it gets alone."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpu_workers.batch import ForwardBatch
from gpu_workers.comm import LocalComm
from gpu_workers.runner import Runner
from tests.unit.gpu_workers.plans import LogitsModel, plain_backend
from tests.unit.scheduler_proc.engine import Engine
from tests.unit.scheduler_proc.fake_worker import VOCABULARY, continuation

MAX_MODEL_LEN = 40


class DigestModel(LogitsModel):
    """The fake worker's "model": logits that point at a digest of all tokens which the block table leads to."""

    arch = SimpleNamespace(vocab_size=VOCABULARY)
    backend = plain_backend()

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv = torch.full((num_blocks * block_size,), -1, dtype=torch.int64)

    def forward(self, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        kv[batch.slots] = batch.token_ids
        logits = torch.zeros(len(batch.logits_rows), VOCABULARY)
        ends = {end - 1: sequence for sequence, end in enumerate(batch.query_starts[1:])}
        for i, flat in enumerate(batch.logits_rows.tolist()):
            sequence = ends[flat]
            positions = torch.arange(batch.context_lens[sequence])
            blocks = batch.block_tables[sequence].long()[positions // self.block_size]
            tokens = kv[blocks * self.block_size + positions % self.block_size].tolist()
            logits[i, continuation(tokens, 1, frozenset())[0]] = 1.0
        self.states = torch.stack((batch.token_ids, batch.positions, torch.ones_like(batch.positions)), dim=-1).float()
        return logits

    def hidden_states(self, token_rows: np.ndarray) -> torch.Tensor:
        """Of each token its id, its position and 1."""
        return self.states[token_rows]


def make_engine(num_blocks: int, max_seqs: int, chunk: int) -> Engine:
    engine = Engine(
        num_blocks=num_blocks, max_seqs=max_seqs, max_step_tokens=16, prefill_chunk=chunk, max_model_len=MAX_MODEL_LEN
    )
    model = DigestModel(num_blocks, 4)
    engine.worker = Runner(model, model.kv, num_blocks, 4, max_seqs, MAX_MODEL_LEN, LocalComm())
    return engine


@pytest.mark.parametrize("seed", range(12))
def test_histories_of_the_real_scheduler(seed):
    """Random arrivals, aborts and stops over a pool so small that requests are preempted and the cache is evicted."""
    draw = random.Random(seed)
    engine = make_engine(num_blocks=draw.choice([12, 20, 60]), max_seqs=4, chunk=draw.choice([3, 16]))
    prefix = [draw.randrange(1, VOCABULARY) for _ in range(12)]
    for request_id in range(40):
        prompt = prefix[: draw.choice([0, 8, 12])] + [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 20))]
        stops = draw.choice([(0,), ()])
        engine.submit(request_id, prompt, draw.randrange(1, MAX_MODEL_LEN - len(prompt) + 1), stops)
        for _ in range(draw.randrange(4)):
            engine.step()
        if draw.random() < 0.1:
            engine.abort(draw.randrange(request_id + 1))
    engine.run_to_idle()


@pytest.mark.parametrize("seed", range(4))
def test_embeddings_under_the_real_scheduler(seed):
    """Of each position exactly once, in any company, with the prefix cached or not, and after a preemption."""
    draw = random.Random(seed)
    engine = make_engine(num_blocks=20, max_seqs=4, chunk=draw.choice([3, 16]))
    prefix = [draw.randrange(1, VOCABULARY) for _ in range(12)]
    poolings = {}
    for request_id in range(30):
        prompt = prefix[: draw.choice([0, 8, 12])] + [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 25))]
        poolings[request_id] = draw.choice(["last", "mean", "cls", ""])
        most = 1 if poolings[request_id] else draw.randrange(1, MAX_MODEL_LEN - len(prompt) + 1)
        engine.submit(request_id, prompt, most, (), pooling=poolings[request_id])
        for _ in range(draw.randrange(3)):
            engine.step()
    engine.run_to_idle()
    for request_id, (prompt, *_) in engine.submitted.items():
        pooling, n = poolings[request_id], len(prompt)
        first, end = {"last": (n - 1, n), "mean": (0, n), "cls": (0, 1), "": (0, 0)}[pooling]
        total = np.array([(prompt[at], at, 1) for at in range(first, end)], dtype=np.float64).sum(axis=0)
        found = np.frombuffer(engine.embeddings.get(request_id, b""), dtype="<f4")
        np.testing.assert_allclose(found, total / np.linalg.norm(total) if pooling else [], rtol=1e-6)
        if pooling in ("mean", "cls"):
            assert engine.cached[request_id] == 0
    assert any(engine.cached[request_id] for request_id, pooling in poolings.items() if pooling == "last")


def test_a_request_that_fills_the_context_to_the_last_token():
    engine = make_engine(num_blocks=20, max_seqs=2, chunk=16)
    engine.submit(0, [7] * 9, MAX_MODEL_LEN - 9, stops=())
    engine.run_to_idle()
    assert engine.ends == {0: "length"}
    assert len(engine.outputs[0]) == MAX_MODEL_LEN - 9
