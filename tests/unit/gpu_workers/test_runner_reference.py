"""The runner with the real model in float32, against what transformers generated greedily from the same weights.

Every step of the rows used here has a margin above the tolerance of float32, so all tokens must be equal.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from config.arch import read_arch
from config.schema import ChildSpec, Config, Endpoints, ModelConfig, WorkerConfig
from gpu_workers.backends import make_backend
from gpu_workers.comm import LocalComm
from gpu_workers.runner import Runner
from gpu_workers.weights.loader import load_model
from ipc.codec import unpack_ints
from tests.unit.gpu_workers.plans import new_row, plan, spec

BLOCK_SIZE = 16
MAX_LEN = 512
BLOCKS_PER_ROW = MAX_LEN // BLOCK_SIZE
TOLERANCE = 0.001


@dataclass
class Engine:
    """A runner with a row and a range of blocks for each of eight requests."""

    runner: Runner
    step: int = 0

    def execute(self, scheduled, **changes) -> list[int]:
        result = self.runner.execute(plan(self.step, scheduled, **changes))
        self.step += 1
        return list(unpack_ints(result.token_ids))

    def generate(self, prompts, counts, *, chunk: int, samplings=None) -> list[list[int]]:
        """All together, each prompt in chunks of at most `chunk` tokens."""
        samplings = samplings or [spec()] * len(prompts)
        new = [
            new_row(row, prompt, range(row * BLOCKS_PER_ROW, (row + 1) * BLOCKS_PER_ROW), sampling=sampling)
            for row, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        outputs: list[list[int]] = [[] for _ in prompts]
        computed = [0] * len(prompts)
        while any(len(output) < count for output, count in zip(outputs, counts, strict=True)):
            scheduled = []
            for row, prompt in enumerate(prompts):
                missing = len(prompt) + len(outputs[row]) - computed[row]
                if len(outputs[row]) < counts[row]:
                    count = min(chunk, missing)
                    scheduled.append((row, computed[row], count, int(count == missing)))
                    computed[row] += count
            sampled = iter(self.execute(scheduled, new=new))
            new = []
            for row, _, _, sample in scheduled:
                if sample:
                    outputs[row].append(next(sampled))
        self.execute([], freed=range(len(prompts)))
        return outputs


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Engine:
    torch.set_num_threads(1)
    child = ChildSpec(
        role="worker",
        index=0,
        config=Config(
            model=ModelConfig(dtype="float32", max_model_len=MAX_LEN),
            worker=WorkerConfig(device="cpu", threads=1, deterministic=True),
        ),
        arch=read_arch(model_path),
        model_path=str(model_path),
        served_names=(),
        endpoints=Endpoints(clients=(), scheduler="", workers="", stats=""),
        run_dir="",
        incarnation=1,
        kv_memory_bytes=0,
        num_blocks=8 * BLOCKS_PER_ROW,
    )
    model = load_model(
        child, make_backend("cpu", "float32", 1, True, quantized=False), LocalComm(), lambda stage, fraction: None
    )
    kv = model.allocate_kv(child.num_blocks, BLOCK_SIZE)
    return Engine(Runner(model, kv, child.num_blocks, BLOCK_SIZE, 8, MAX_LEN, LocalComm()))


@pytest.fixture(scope="module")
def references(shared_dir: Path) -> list[dict]:
    with (shared_dir / "reference" / "greedy.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    short = [row for row in rows if len(row["prompt_ids"]) < 200 and min(row["margins"]) >= TOLERANCE]
    # A prompt of 189 tokens, then chats and raw texts of 3 to 51: mixed lengths make the batch uneven.
    chosen = [row for row in short if len(row["prompt_ids"]) > 100][:1]
    chosen += [row for row in short if row["kind"] == "chat"][:4] + [row for row in short if row["kind"] == "raw"][:3]
    assert len(chosen) == 8
    return chosen


def prompts_of(references) -> list[list[int]]:
    return [row["prompt_ids"] for row in references]


def outputs_of(references, limit: int) -> list[list[int]]:
    return [row["output_ids"][:limit] for row in references]


@pytest.mark.parametrize("chunk", [MAX_LEN, 16], ids=["whole prompts", "chunks of 16"])
def test_eight_together_give_the_reference_tokens(engine, references, chunk):
    expected = outputs_of(references, 64)
    counts = [len(output) for output in expected]
    assert engine.generate(prompts_of(references), counts, chunk=chunk) == expected


def test_each_alone_gives_the_reference_tokens(engine, references):
    for row, expected in zip(references, outputs_of(references, 8), strict=True):
        assert engine.generate([row["prompt_ids"]], [len(expected)], chunk=MAX_LEN) == [expected]


def test_draws_alone_in_chunks_and_together_are_the_same(engine, references):
    prompts = prompts_of(references)
    samplings = [
        spec(temperature=0.6 + 0.1 * i, seed=i, top_p=0.95, top_k=[0, 40][i % 2], repetition_penalty=1.1, logprobs=2)
        for i in range(len(prompts))
    ]
    together = engine.generate(prompts, [8] * len(prompts), chunk=MAX_LEN, samplings=samplings)
    for i, prompt in enumerate(prompts):
        assert engine.generate([prompt], [8], chunk=11, samplings=samplings[i : i + 1]) == together[i : i + 1]
    greedy = outputs_of(references, 8)
    assert sum(a != b for a, b in zip(together, greedy, strict=True)) >= 4
