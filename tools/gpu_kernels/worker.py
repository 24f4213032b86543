"""A process that runs cases on the GPU, or under the interpreter: `tools.gpu_kernels.device` asks for what it does."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from kernels.gpu.launch import INTERPRETED
from kernels.gpu.tables import trying
from tools.gpu_kernels.case import Case
from tools.gpu_kernels.checking import launch_poisoned, worst_error
from tools.gpu_kernels.machine import clocks, describe
from tools.gpu_kernels.measure import GpuLimits, Stopwatch, keep_busy, measure, measure_limits
from tools.gpu_kernels.registry import cases_by_label
from tools.gpu_kernels.workers import Answer, Request, serve

_DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
_SEED = 1
_MOST_CHARACTERS = 600  # of an error


class _Runner:
    """Keeps what more than one request needs."""

    def __init__(self) -> None:
        self._expected: tuple[str, Any] = ("", None)

    @torch.inference_mode()
    def answers(self, request: Request) -> Iterator[Answer]:
        """Of a request without `units` the machine; else one for each unit, a case's label and a candidate's number."""
        if "units" not in request:
            yield self._machine(request["seconds"])
            return
        for label, candidate in request["units"]:
            case = cases_by_label(tuple(request["modules"]))[label]
            try:
                answer = self._run(case, None if candidate is None else case.candidates[candidate], request)
            except Exception as error:  # whatever a kernel, its wrapper or its oracle raises is the result
                _end_if_broken()
                answer = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MOST_CHARACTERS]}
            yield answer

    def _machine(self, seconds: float) -> Answer:
        limits = measure_limits(_stopwatch(), _DEVICE, seconds)
        with keep_busy(_DEVICE, limits):
            under_load = clocks(_DEVICE)
        return {"machine": describe(_DEVICE) | under_load, "limits": asdict(limits)}

    def _run(self, case: Case, settings: Mapping[str, Any] | None, request: Request) -> Answer:
        answer: Answer = {}
        with nullcontext() if settings is None else trying(settings, case.kernel):
            prepared = case.prepare(_DEVICE, _SEED)
            if request["check"]:
                actual = launch_poisoned(prepared)
                if self._expected[0] != case.label:
                    assert prepared.expected is not None
                    self._expected = case.label, prepared.expected()
                answer["error"] = worst_error(actual, self._expected[1])
            if request["seconds"]:
                limits = GpuLimits(**request["limits"])
                answer["measured"] = asdict(measure(case, prepared, _stopwatch(), limits, request["seconds"]))
        return answer


@cache
def _stopwatch() -> Stopwatch:
    return Stopwatch(_DEVICE)


def _end_if_broken() -> None:
    """After some errors nothing works any more in a process: a new one is needed."""
    if not INTERPRETED:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    serve(_Runner().answers)
