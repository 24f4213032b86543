"""Where GPU kernels are tested: under Triton's interpreter, or on a GPU where there is one.

tests/conftest.py sets TRITON_INTERPRET where there is no GPU, before anything imports triton.
"""

import torch

from kernels.gpu.launch import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device = DEVICE) -> torch.Tensor:
    """For outputs: NaN, or of integers the largest value, so that what a kernel does not write is seen."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, device=device).to(dtype)
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype, device=device)
