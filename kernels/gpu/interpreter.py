"""Triton's interpreter, made to do as devices do: convert between float32 and bfloat16, divide quietly, add up rows.

By itself (seen in triton 3.9) it cuts off the last 16 bits, where devices round to the nearest number: that makes all
results in bfloat16 too small, by half a step on average, and hides in which order a kernel rounds. Nor does it know
subnormals. And it multiplies matrices with the machine's BLAS, some of which (OpenBLAS on CPUs without AVX-512) adds a
row up in an order that depends on where in the tile it is.
"""

import warnings
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_by_itself = interpreter._convert_float
_dot_by_itself = interpreter.InterpreterBuilder.create_dot


def convert_as_devices() -> None:
    """From now on, in this process."""
    interpreter._convert_float = _convert


def multiply_as_devices() -> None:
    """From now on, in this process: a row of a product has the same bits wherever in the tile it is."""
    interpreter.InterpreterBuilder.create_dot = _dot


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


def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a @ b + d of [..., m, k], [..., k, n] and [..., m, n]: each row as a product of its own."""
    if not d.dtype.scalar.is_floating():  # integers are exact in any order
        return _dot_by_itself(builder, a, b, d, input_precision, max_num_imprecise_acc)
    rows = interpreter.TensorHandle(a.data[..., :, None, :], a.dtype)
    columns = interpreter.TensorHandle(b.data[..., None, :, :], b.dtype)
    sums = interpreter.TensorHandle(d.data[..., :, None, :], d.dtype)
    found = _dot_by_itself(builder, rows, columns, sums, input_precision, max_num_imprecise_acc)
    return interpreter.TensorHandle(found.data[..., 0, :], d.dtype.scalar)
