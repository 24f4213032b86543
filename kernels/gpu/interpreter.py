"""Triton's interpreter, made to convert between float32 and bfloat16 as devices do, and to divide as quietly.

By itself (seen in triton 3.9) it cuts off the last 16 bits, where devices round to the nearest number: that makes all
results in bfloat16 too small, by half a step on average, and hides in which order a kernel rounds. Nor does it know
subnormals.
"""

import warnings
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_by_itself = interpreter._convert_float


def convert_as_devices() -> None:
    """From now on, in this process."""
    interpreter._convert_float = _convert


def divide_as_devices() -> None:
    """From now on, in this process: infinities and NaNs come without numpy's warnings, as kernels count on them."""
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter$")


def _convert(values: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """The bits of `values`, or those of bfloat16 as uint16, after a conversion."""
    if source == tl.float32 and target == tl.bfloat16:
        rounded = torch.from_numpy(np.array(values)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)
    if source == tl.bfloat16 and target == tl.float32:
        return np.left_shift(values, 16, dtype=np.uint32).reshape(values.shape)
    return _by_itself(values, source, target, rounding_mode)
