"""Cases run in another process, on the GPU or under the interpreter: whether they are right, and how fast they are."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from tools.gpu_kernels.case import Case
from tools.gpu_kernels.measure import GpuLimits, Measured
from tools.gpu_kernels.workers import Worker, ask_all

_MODULE = "tools.gpu_kernels.worker"
_SECONDS = 120.0  # for one case; that of a rival that torch compiles takes long
_MACHINE_SECONDS = 120.0
_LIMIT_SECONDS = 0.3  # for each of the machine's limits

NO_GPU = (
    "there is no GPU here that torch can use. Without one: `python -m tools.compile_kernels` compiles all kernels, "
    "`python -m tools.check_gpu --interpret` and `pytest tests/kernels/gpu` run them under Triton's interpreter."
)


@dataclass(frozen=True, slots=True)
class Ran:
    """A case, with the settings of the table or with a candidate. `error` and `measured` only where asked for."""

    case: Case
    candidate: int | None
    failed: str = ""  # why it did not run
    error: float | None = None  # relative, see `tools.gpu_kernels.checking`
    measured: Measured | None = None

    @property
    def problem(self) -> str:
        """What is wrong, or ""."""
        if self.failed:
            return self.failed
        if self.error is not None and not self.error <= self.case.tolerance:
            return f"relative error {self.error:.2g}, above {self.case.tolerance:g}"
        return ""


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU: names and values in words, the name of its table of settings, and its measured limits."""

    described: dict[str, str]
    limits: GpuLimits

    @property
    def architecture(self) -> str:
        return self.described["table of settings"]


def worker(interpreted: bool = False) -> Worker:
    """A process that runs cases."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    return Worker(_MODULE, environment)


def machine_of(process: Worker) -> Machine:
    """Measures the GPU's limits. Raises `LostError`."""
    (answer,) = process.ask({"seconds": _LIMIT_SECONDS}, _MACHINE_SECONDS)
    return Machine(answer["machine"], GpuLimits(**answer["limits"]))


def run_cases(
    process: Worker,
    units: Sequence[tuple[Case, int | None]],
    modules: Sequence[str],
    *,
    check: bool = False,
    seconds: float = 0.0,
    limits: GpuLimits | None = None,
    until: float = math.inf,
) -> Iterator[Ran]:
    """Each case with the settings of the table, or with the candidate of that number.

    `check`: against the case's oracle. `seconds`: measured for about so long, for which `limits` are needed; 0: not.
    What has not begun at `until`, on the clock of `time.monotonic`, is left out.
    """
    cases = {case.label: case for case, _ in units}
    common = {
        "modules": list(modules),
        "check": check,
        "seconds": seconds,
        "limits": asdict(limits) if limits else None,
    }
    requests = [{**common, "units": [(case.label, candidate)]} for case, candidate in units]
    for result in ask_all([process], requests, _SECONDS, until):
        label, candidate = result.unit
        answer = result.answer or {"failed": result.lost}
        measured = answer.get("measured")
        yield Ran(
            cases[label],
            candidate,
            answer.get("failed", ""),
            answer.get("error"),
            Measured(**measured) if measured else None,
        )
