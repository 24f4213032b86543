"""The real model through the interpreted GPU kernels, against what transformers generated greedily from it."""

import json
from pathlib import Path

import pytest
import torch

from gpu_workers.backends.triton_gpu import TritonBackend
from gpu_workers.comm import LocalComm
from gpu_workers.runner import Runner
from ipc.codec import unpack_ints
from tests.kernels.gpu.device import DEVICE
from tests.unit.gpu_workers.plans import new_row, plan
from tools.score.model import assemble

ROWS, TOKENS = 2, 3
BLOCKS = 8  # of each row


@pytest.mark.slow
@pytest.mark.parametrize(("quantized", "kv_dtype"), [(False, "float32"), (True, "float32")])
def test_the_first_tokens_of_the_shortest_rows(
    model_path: Path, shared_dir: Path, quantized: bool, kv_dtype: str
) -> None:
    """Their margins are all above float32's error, 0.001: each must be right. One chunk each, then graphs of three."""

    rows = [json.loads(line) for line in (shared_dir / "reference" / "greedy.jsonl").read_text().splitlines()]
    rows = [row for row in rows if len(row["output_ids"]) > TOKENS and min(row["margins"][:TOKENS]) > 0.001]
    rows = sorted(rows, key=lambda row: len(row["prompt_ids"]))[:ROWS]
    model = assemble(model_path, TritonBackend(DEVICE, torch.float32, False, quantized, kv_dtype))
    runner = Runner(model, model.allocate_kv(ROWS * BLOCKS, 16), ROWS * BLOCKS, 16, ROWS, BLOCKS * 16 - 1, LocalComm())
    runner.capture([ROWS], lambda done: None)
    prompts = [row["prompt_ids"] for row in rows]
    new = [new_row(at, ids, range(at * BLOCKS, (at + 1) * BLOCKS)) for at, ids in enumerate(prompts)]
    found = [
        unpack_ints(
            runner.execute(plan(0, [(at, 0, len(ids), 1) for at, ids in enumerate(prompts)], new=new)).token_ids
        )
    ]
    for step in range(TOKENS - 1):
        scheduled = [(at, len(ids) + step, 1, 1) for at, ids in enumerate(prompts)]
        found.append(unpack_ints(runner.execute(plan(1 + step, scheduled)).token_ids))
    for row, tokens in zip(rows, zip(*found, strict=True), strict=True):
        assert list(tokens) == row["output_ids"][:TOKENS]
