"""What the kernels compute with other instruction sets than this CPU's best, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels.cpu.build import ISAS, BuildError, build, detect_isa

from .recorded import evaluate, in_turn, linear, rms_norm
from .test_native_ops import INTEGERS, random_weight

REPOSITORY = Path(__file__).resolve().parents[3]
TESTS = Path(__file__).resolve().parent

RUN = """
import sys
import torch
from safetensors.torch import save_file
from tests.kernels.cpu.test_instruction_sets import results
torch.set_num_threads(1)
save_file({name: result.contiguous() for name, result in results().items()}, sys.argv[1])
"""


def with_isa(isa: str, *command: str) -> subprocess.CompletedProcess[str]:
    try:
        build(isa)
    except BuildError as error:
        pytest.skip(f"no kernels for {isa} here: {error}")
    environment = os.environ | {"TOKENMILL_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


def results() -> dict[str, torch.Tensor]:
    """Some products with this process' instruction set.

    The inputs are whole numbers, whose squares have exact sums: fused or not, norms give the same bits and codes.
    """
    random = torch.Generator().manual_seed(0)
    found = {}
    for k in (32, 320):
        x = torch.randint(-20, 21, (23, k), generator=random).float()
        norm = rms_norm(torch.ones(k), 1e-5)
        found[f"norm {k}"] = evaluate(x, norm, k)
        for kind in INTEGERS:
            weight = random_weight(kind, 21, k, random)
            product = in_turn(norm, linear(weight))
            found[f"{kind} {k}"] = evaluate(x, product, 21)
    return found


def test_quantized_products_are_the_same_without_vector_instructions(tmp_path: Path) -> None:
    found = []
    for isa in (detect_isa(), "portable"):
        file = tmp_path / f"{isa}.safetensors"
        done = with_isa(isa, "-c", RUN, str(file))
        assert done.returncode == 0, done.stderr
        found.append(load_file(file))
    ours, portable = found
    assert ours.keys() == portable.keys()
    for name, result in ours.items():
        # One group of 32 and nothing apart: an exact sum times one scale. Otherwise sums are added up, fused or not.
        if name in ("norm 32", "norm 320", "int8 32"):
            assert torch.equal(portable[name], result), name
        else:
            assert (portable[name] - result).abs().max() <= 2e-6 * result.abs().max(), name


@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=[] if isa == "portable" else pytest.mark.slow) for isa in ISAS]
)
def test_every_op_is_the_oracles_with_other_instructions(isa: str) -> None:
    if isa == detect_isa():
        pytest.skip(f"{isa} is what the other tests of this folder run on")
    files = [str(TESTS / name) for name in ("test_native_ops.py", "test_native_attention.py")]
    done = with_isa(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-10_000:]
    assert " passed" in done.stdout
