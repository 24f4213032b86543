"""Real ranks over gloo against one."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

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
import sys
from pathlib import Path
import numpy as np
from safetensors.torch import save_file
from gpu_workers.comm import make_comm
from tests.unit.gpu_workers.tiny import load_tiny, whole_logits
rank, port, out, model, kernels = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5]
comm = make_comm(rank, int(sys.argv[6]), port, timeout=60)
model = load_tiny(model, comm=comm, kernels=kernels)
logits = whole_logits(model, list(range(0, 130, 3))).contiguous()
more = model.more_logits(np.array([30, 2])).contiguous()
save_file({"logits": logits, "more": more, "states": model.hidden_states(np.arange(44)).contiguous()}, out)
comm.close()
"""


BIASED_AND_TIED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("kernels", "size", "settings"),
    [
        ("native", 2, {}),
        ("native", 2, BIASED_AND_TIED),
        ("torch", 2, BIASED_AND_TIED),
        # Of 2 KV heads the first is on three ranks, whose 3 queries they share, the second on two.
        ("native", 5, BIASED_AND_TIED),
        ("torch", 5, {}),
        # 3 KV heads on two ranks, and 32 x 3 columns: two groups and one.
        ("native", 2, {"num_key_value_heads": 3, "intermediate_size": 96}),
        ("torch", 2, {"num_key_value_heads": 3, "intermediate_size": 96}),
    ],
    ids=str,
    indirect=["kernels"],
)
def test_ranks_compute_what_one_does(settings: dict[str, Any], size: int, kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, **settings)  # a vocabulary of 131 does not divide
    model = load_tiny(tmp_path, kernels=kernels)
    expected = whole_logits(model, TOKENS)
    states = model.hidden_states(np.arange(44)).clone()
    results = run_ranks(size, RANK, tmp_path, str(tmp_path), kernels, str(size))
    logits = [result["logits"] for result in results]
    assert all(torch.equal(result["more"], logits[0][[30, 2]]) for result in results), "also asked for afterwards"
    assert all(torch.equal(logits[0], others) for others in logits)
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-4)
    # What rank 0 makes embeddings of.
    torch.testing.assert_close(results[0]["states"], states, rtol=0, atol=1e-4)


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
