"""Real ranks over gloo against one."""

import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kernels.cpu.build import BuildError
from kernels.cpu.library import load
from tests.unit.gpu_workers.tiny import load_tiny, save_tiny, whole_logits

TOKENS = list(range(0, 130, 3))


def run_ranks(size: int, code: str, folder: Path, *arguments: str) -> list[dict[str, torch.Tensor]]:
    """What each of the processes saved that run `code` with rank, port, path to save to, and `arguments`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outs = [folder / f"{rank}.out" for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(port), str(out), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, out in enumerate(outs)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    return [load_file(out) for out in outs]


RANK = """
import json
import sys
from pathlib import Path
import numpy as np
from safetensors.torch import save_file
from gpu_workers.comm import make_comm
from tests.unit.gpu_workers.tiny import load_tiny, whole_logits
rank, port, out, size, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
comm = make_comm(rank, size, port, timeout=60)
found = {}
for name, folder, kernels in json.loads(cases):
    model = load_tiny(Path(folder), comm=comm, kernels=kernels)
    found[name + ".logits"] = whole_logits(model, list(range(0, 130, 3))).contiguous().clone()
    found[name + ".more"] = model.more_logits(np.array([30, 2])).contiguous().clone()
    found[name + ".states"] = model.hidden_states(np.arange(44)).contiguous().clone()
save_file(found, out)
comm.close()
"""


BIASED_AND_TIED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
# Of 2 KV heads the first is on three of five ranks, whose 3 queries they share, the second on two. 3 KV heads on two
# ranks, and 32 x 3 columns: two groups and one.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("native", 2, {}),
    ("native", 2, BIASED_AND_TIED),
    ("torch", 2, BIASED_AND_TIED),
    ("native", 5, BIASED_AND_TIED),
    ("torch", 5, {}),
    ("native", 2, {"num_key_value_heads": 3, "intermediate_size": 96}),
    ("torch", 2, {"num_key_value_heads": 3, "intermediate_size": 96}),
]
Answers = Callable[[int], list[dict[str, torch.Tensor]]]


# Of the session: pytest comes back to this file for the other kernels.
@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of each case."""
    folders = [tmp_path_factory.mktemp("model") for _ in CASES]
    for folder, (_, _, settings) in zip(folders, CASES, strict=True):
        save_tiny(folder, **settings)  # a vocabulary of 131 does not divide
    return folders


@pytest.fixture(scope="session")
def answers(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What so many ranks compute in all cases that are for so many: they are slow to start."""

    @functools.cache
    def of(size: int) -> list[dict[str, torch.Tensor]]:
        asked = [
            (str(number), str(models[number]), kernels)
            for number, (kernels, ranks, _) in enumerate(CASES)
            if ranks == size and (kernels != "native" or has_native())
        ]
        return run_ranks(size, RANK, tmp_path_factory.mktemp("ranks"), str(size), json.dumps(asked))

    return of


def has_native() -> bool:
    try:
        load()
    except BuildError:
        return False
    return True


@pytest.mark.parametrize(
    ("number", "kernels"), [(number, kernels) for number, (kernels, _, _) in enumerate(CASES)], indirect=["kernels"]
)
def test_ranks_compute_what_one_does(number: int, kernels: str, models: list[Path], answers: Answers) -> None:
    model = load_tiny(models[number], kernels=kernels)
    expected = whole_logits(model, TOKENS)
    states = model.hidden_states(np.arange(44)).clone()
    results = answers(CASES[number][1])
    logits = [result[f"{number}.logits"] for result in results]
    more = [result[f"{number}.more"] for result in results]
    assert all(torch.equal(each, logits[0][[30, 2]]) for each in more), "also asked for afterwards"
    assert all(torch.equal(logits[0], others) for others in logits)
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-4)
    # What rank 0 makes embeddings of.
    torch.testing.assert_close(results[0][f"{number}.states"], states, rtol=0, atol=1e-4)


SUM = """
import sys
import torch
from safetensors.torch import save_file
from gpu_workers.comm import make_comm
rank, port, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
comm = make_comm(rank, 3, port, timeout=60)
x = torch.randn(7, 33, generator=torch.Generator().manual_seed(rank))
alone = torch.cat([comm.all_reduce(x[row : row + 1].clone()) for row in range(7)])
save_file({"together": comm.all_reduce(x.clone()), "alone": alone}, out)
comm.close()
"""


def test_sums_over_three_ranks_do_not_depend_on_the_other_rows(tmp_path: Path) -> None:
    results = run_ranks(3, SUM, tmp_path)
    expected = sum(torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)).double() for rank in range(3))
    for result in results:
        assert torch.equal(result["together"], results[0]["together"])
        assert torch.equal(result["together"], result["alone"])
        torch.testing.assert_close(result["together"].double(), expected, rtol=0, atol=1e-5)
