"""A program: what a rank's start compiles for a GPU, and what random steps after it compile still. Prints both as JSON.

Kernels are compiled and not run (`kernels.gpu.launch.compiling`), so it needs no GPU; tensors keep what is in them.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from config.arch import read_arch
from gpu_workers import prompt_scores
from gpu_workers.backends import triton_sampling
from gpu_workers.backends.triton_gpu import TritonBackend
from gpu_workers.comm import LocalComm
from gpu_workers.models.llama import LlamaModel
from gpu_workers.runner import Runner
from gpu_workers.warm_up import WarmUp
from gpu_workers.weights.loader import open_source
from gpu_workers.weights.source import Weights
from ipc.codec import pack_ints
from kernels.gpu.launch import Compilation, compiling
from tests.unit.gpu_workers.plans import new_row, plan, spec

BLOCK_SIZE, NUM_BLOCKS, ROWS, STEP_TOKENS = 16, 160, 5, 128
MAX_LEN = 2000  # above the SEGMENT of the tables, from which on attention is split
SAMPLINGS = [
    spec(),
    spec(temperature=0.7, seed=1, top_p=0.9),
    spec(repetition_penalty=1.2, logprobs=1),
    spec(bias={3: 1.0, 5: 2.0, 7: 1.0}, temperature=1.0, top_k=5),
    spec(allowed_ids=pack_ints([1, 2]), banned=[4, 5], min_tokens=3),
    spec(prompt_logprobs=2),
]


def load(path: Path, kv_dtype: str, deterministic: bool) -> LlamaModel:
    backend = TritonBackend(torch.device("cpu"), torch.bfloat16, deterministic, True, kv_dtype)
    weights = Weights(open_source(path), lambda fraction: None)
    return LlamaModel(read_arch(path), MAX_LEN, weights, backend, LocalComm())


def random_steps(runner: Runner, steps: int) -> None:
    """Prompts in chunks of any length beside decodes of any number of rows, some of them behind a long prefix."""
    draw = random.Random(0)
    known: dict[int, tuple[int, int]] = {}  # row -> tokens known, tokens computed
    for step in range(steps):
        new, freed, scheduled = [], [], []
        left = STEP_TOKENS
        for row in range(ROWS):
            if row not in known or draw.random() < 0.1:
                if row in known:
                    freed.append(row)
                length = draw.randrange(2, draw.choice([140, MAX_LEN - steps]))
                computed = max(0, length - draw.randrange(1, 140))
                table = range(length // BLOCK_SIZE + 6)
                sampling = SAMPLINGS[draw.randrange(len(SAMPLINGS))]
                new.append(new_row(row, [0] * length, table, sampling=sampling, num_scored=computed))
                known[row] = length, computed
            if draw.random() < 0.3:
                continue
            tokens, computed = known[row]
            count = draw.choice([1, 15, 16, 17, tokens]) if tokens - computed > 1 else 1
            count = min(count, tokens - computed, left - (ROWS - row))
            left -= count
            sample = computed + count == tokens
            scheduled.append((row, computed, count, int(sample)))
            known[row] = tokens + sample, computed + count
        runner.execute(plan(step, scheduled, new=new, freed=freed))


def names(found: list[Compilation]) -> dict[str, str]:
    return {each.hash: f"{each.kernel} {each.constants}" for each in found}


def main(path: Path, kv_dtype: str, deterministic: bool) -> None:
    # Nobody computes ids or scores, so what is downloaded means nothing.
    prompt_scores._prompt_scores = lambda *columns: None
    triton_sampling.DeviceDrawn.result = lambda drawn: (np.zeros(len(drawn._arriving.wait()[0]), dtype=np.int64), ())
    model = load(path, kv_dtype, deterministic)
    kv = model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)

    def make_runner(rows: int) -> Runner:
        return Runner(model, kv, NUM_BLOCKS, BLOCK_SIZE, rows, MAX_LEN, LocalComm())

    with compiling("sm_90") as found:
        sizes = {"max_seqs": ROWS, "max_model_len": MAX_LEN, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
        WarmUp(make_runner, **sizes).compile_kernels(STEP_TOKENS)
        runner = make_runner(ROWS)
        runner.capture([1, 2, 4], lambda done: None)
        at_start = names(found)
        random_steps(runner, 60)
        later = {key: name for key, name in names(found).items() if key not in at_start}
    print(json.dumps({"at_start": sorted(at_start.values()), "later": sorted(later.values())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "deterministic")
