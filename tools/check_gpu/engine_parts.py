"""The engine on the GPU, in a process of its own: whether its tokens are right, and how fast its steps are."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from tools.bench_engine.gpu import GpuTimes
from tools.bench_engine.gpu_command import HEADER, columns, label
from tools.bench_engine.random_models import SHAPES
from tools.bench_kernels.command import say
from tools.check_gpu.check import Check
from tools.check_gpu.sections import Section, markdown_table
from tools.check_gpu.targets import judge_steps, reached_text
from tools.gpu_kernels.workers import LateError, LostError, Worker

_WORKER = "tools.check_gpu.engine_worker"
_STEPS = {"prefill": [2048], "decode": [1, 64], "context": 1024, "seconds": 2.0}
_HANGS = 120.0  # seconds without an answer; within fewer, kernels may still be compiled


def rows_right(check: Check, until: float) -> Section:
    """Greedy rows of the reference through the model, on the GPU."""
    title = "Engine right"
    for path in (check.model, check.reference):
        if not path.exists():
            return Section(title, f"not checked, since {path} is not here")
    total = len(check.reference.read_text().splitlines())
    request = {"model": str(check.model), "reference": str(check.reference), "device": "cuda"}
    done, steps, equal, worst = 0, 0, 0, 0.0
    failures: list[str] = []
    late = ""
    left = max(until - time.monotonic(), 1.0)
    with Worker(_WORKER) as process:
        try:
            for answer in process.ask(request, left):
                if "failed" in answer:
                    return Section(title, "the model could not be run", failures=[answer["failed"]])
                done += 1
                steps += answer["steps"]
                equal += answer["equal"]
                worst = max(worst, answer["worst_error"])
                failures += answer["mismatches"]
                say(f"engine {done}/{total}")
                if time.monotonic() >= until:
                    break
        except LostError as error:
            if _is_failure(error, left):
                failures.append(str(error))
            else:
                late = "; no time for more"
    summary = (
        f"{done} of {total} rows of the reference, {steps} steps, {len(failures)} failures; {equal} rows equal in "
        f"every token, worst error of a log-probability {worst:.3f}{late}"
    )
    return Section(title, summary, failures=failures)


def steps_speed(check: Check, until: float) -> Section:
    """Prefill and decode steps of public shapes with random weights."""
    found: dict[str, list[GpuTimes]] = {}
    skipped: dict[str, str] = {}
    failures: list[str] = []
    check.process.close()  # what it holds of the GPU's memory is wanted
    with Worker(_WORKER) as process:
        for shape, arch in SHAPES.items():
            left = until - time.monotonic()
            if left <= 0:
                skipped[arch.name] = "no time"
                continue
            say(f"steps of {arch.name}")
            try:
                (answer,) = process.ask({"shape": shape, "limits": asdict(check.machine.limits), **_STEPS}, left)
            except LostError as error:
                answer = {"failed": str(error)} if _is_failure(error, left) else {"skipped": "no time"}
            if "failed" in answer:
                failures.append(f"{arch.name}: {answer['failed']}")
            elif "skipped" in answer:
                skipped[arch.name] = answer["skipped"]
            else:
                found[arch.name] = [GpuTimes(**times) for times in answer["times"]]
    return steps_section(found, skipped, failures)


def _is_failure(error: LostError, seconds: float) -> bool:
    """Whether a process that had so many seconds broke or hangs; else there was no time for it."""
    return not isinstance(error, LateError) or seconds >= _HANGS


def steps_section(
    found: Mapping[str, Sequence[GpuTimes]], skipped: Mapping[str, str], failures: Sequence[str]
) -> Section:
    """A row a step; `skipped`: why models were not measured."""
    rows = [[f"{model} {label(times)}", *columns(times)] for model, steps in found.items() for times in steps]
    text = (
        "Steps launched one behind the other, as a rank does it; weights are random. device: a step's time on the GPU, "
        "in ms; idle: of all time;\nkernels: the step's time over the sum of its kernels' times.\n\n"
        + markdown_table(["step", *HEADER], rows)
        + "".join(f"\nNot measured: {model}: {reason}.\n" for model, reason in skipped.items())
    )
    verdicts = judge_steps(found)
    summary = f"{len(found)} of {len(SHAPES)} models; {reached_text(verdicts)}"
    return Section("Engine's steps", summary, text, failures, verdicts)
