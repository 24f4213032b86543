"""Every kernel compiles for GPUs that are not here, without spills, within their shared memory."""

import pytest

from tests.kernels.gpu.compiling_process import run_compiling


def test_a_case_of_each_kernel() -> None:
    run_compiling("tools.compile_kernels", "--quick", "--architecture", "sm_90", "gfx942", seconds=300)


@pytest.mark.slow
def test_all_cases_and_settings_for_all_architectures() -> None:
    run_compiling("tools.compile_kernels", seconds=3600)
