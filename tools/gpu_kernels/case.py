"""A GPU kernel on one shape: to be compiled without a device, checked against an oracle, measured, and tuned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Launch = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case's data on a device; on "meta" there is no data, and `launch` may only be compiled."""

    launch: Launch  # starts the kernel once, and returns what it wrote
    # What it should have written, in float64 and from the same inputs; a tuple where `launch` returns one.
    expected: Callable[[], Any] | None = None
    rival: Launch | None = None  # the same by a library, where one has it: the name is the case's `rival`


@dataclass(frozen=True, slots=True)
class Case:
    """`num_bytes` and `operations` are what has to be moved and computed at least; a multiply-add is two."""

    kernel: str  # as in the tables of settings
    name: str  # the shape in words, for people
    shape: Mapping[str, int | str]  # what the kernel's wrapper chooses settings by
    prepare: Callable[[torch.device, int], Prepared]  # (device, seed)
    num_bytes: float
    operations: float = 0
    precision: str = "bfloat16"  # of the operations: "bfloat16", "float8", "int8"
    rival: str = ""  # "cuBLAS", "cuDNN SDPA", ...
    tolerance: float = 1e-2  # of the largest error over the largest expected value
    hot: bool = True  # runs in each layer or step: it must not spill registers
    # Settings that are tried when the table is made anew.
    candidates: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def label(self) -> str:
        """What `--only` of the tools is compared with."""
        return f"{self.kernel}/{self.name}"
