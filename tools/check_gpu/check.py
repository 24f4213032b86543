"""What all parts of the check are given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.gpu_kernels.case import Case
from tools.gpu_kernels.device import Machine
from tools.gpu_kernels.workers import Worker


@dataclass(frozen=True, slots=True)
class Check:
    """The cases, from `modules`, and the process that runs them; the model and the reference of the engine's part.

    `wrong`: labels of cases that were found to be wrong, which then are not measured.
    """

    cases: Sequence[Case]
    modules: Sequence[str]
    process: Worker
    machine: Machine
    model: Path
    reference: Path
    wrong: set[str] = field(default_factory=set)
