"""The kernels for AVX-512 on CPUs without it: SIMDe (github.com/simd-everywhere/simde) stands for the intrinsics.

TOKENMILL_SIMDE names a folder that has simde/x86/avx512.h, such as a clone. This shows that the results are right, and
nothing of their speed. Where the CPU has AVX-512, all other tests of this folder run on its own instructions.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels.cpu.build import find_compiler, prebuild

from .recorded import evaluate, gated_linear, in_turn, linear, rms_norm
from .test_native_ops import KINDS, random_rows, random_weight

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[3]
TESTS = Path(__file__).resolve().parent
SUITES = ("test_native_ops.py", "test_layer.py", "test_native_attention.py", "test_native_steps.py")

# The flags that allow AVX-512 are left out: the compiler would use it, also of its own accord.
COMPILER = """#!/bin/sh
for word; do
    shift
    case $word in -mavx512*) ;; *) set -- "$@" "$word" ;; esac
done
exec {compiler} -I {simde} -D SIMDE_ENABLE_NATIVE_ALIASES -include simde/x86/avx512.h "$@"
"""

RUN = """
import sys
import torch
from safetensors.torch import save_file
from tests.kernels.cpu.test_emulation import products
if sys.argv[2:]:
    from tests.kernels.cpu import emulated
torch.set_num_threads(1)
save_file({name: result.contiguous() for name, result in products().items()}, sys.argv[1])
if sys.argv[2:]:
    emulated.check_loaded()
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that runs the kernels for AVX-512 by the plugin `emulated`."""
    simde = Path(os.environ.get("TOKENMILL_SIMDE", "")).absolute()
    if not (simde / "simde/x86/avx512.h").exists():
        pytest.skip("TOKENMILL_SIMDE does not name a folder with SIMDe's headers (simde/x86/avx512.h)")
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("this machine has no C++ compiler")
    folder = tmp_path_factory.mktemp("emulated")
    wrapper = folder / "c++"
    wrapper.write_text(COMPILER.format(compiler=compiler, simde=shlex.quote(str(simde))))
    wrapper.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", shlex.quote(str(wrapper)))
        library = prebuild("avx512", folder)
    return os.environ | {"TOKENMILL_EMULATED": str(library), "OMP_NUM_THREADS": "1"}


def python(environment: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-10_000:]


def products() -> dict[str, torch.Tensor]:
    """Products of all kinds with this process' kernels, of whole and of partly filled panels and tiles."""
    random = torch.Generator().manual_seed(0)
    found = {}
    for k in (32, 320):
        norm = rms_norm(torch.randn(k, generator=random), 1e-5)
        for rows in (1, 7, 47):
            x = random_rows(rows, k, random)
            for kind in KINDS:
                for n in (16, 33, 100):
                    product = in_turn(norm, linear(random_weight(kind, n, k, random)))
                    found[f"{kind}, {rows} rows, {k} inputs, {n} columns"] = evaluate(x, product, n)
                gated = in_turn(norm, gated_linear(random_weight(kind, 80, k, random), None, "silu"))
                found[f"{kind}, {rows} rows, {k} inputs, gated"] = evaluate(x, gated, 40)
    return found


def test_products_have_the_bits_of_avx2(emulated: dict[str, str], tmp_path: Path) -> None:
    ours, narrow = tmp_path / "avx512.safetensors", tmp_path / "avx2.safetensors"
    python(emulated, "-c", RUN, str(ours), "emulated")
    python(os.environ | {"TOKENMILL_CPU_ISA": "avx2", "OMP_NUM_THREADS": "1"}, "-c", RUN, str(narrow))
    found, expected = load_file(ours), load_file(narrow)
    assert found.keys() == expected.keys()
    for name, result in found.items():
        assert torch.equal(result, expected[name]), name


def test_every_op_is_the_oracles(emulated: dict[str, str]) -> None:
    files = [str(TESTS / name) for name in SUITES]
    options = ["-q", "-p", "tests.kernels.cpu.emulated", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    python(emulated, "-m", "pytest", *options, *files)
