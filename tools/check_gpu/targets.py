"""What the GPU kernels are to reach, and whether measured cases do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from tools.bench_engine.gpu import GpuTimes
from tools.gpu_kernels.case import Case
from tools.gpu_kernels.measure import Measured


@dataclass(frozen=True, slots=True)
class Target:
    """`labels`: globs of the cases that it is for, as far as they move `least_bytes`.

    `of`: what must be at least `least`. "fraction": of the limit that binds; "speedup": the rival's time over the
    case's, where it has one; "pair": the same with another case as the rival, whose label has `pair`'s second text in
    the place of the first.
    """

    text: str
    labels: Sequence[str]
    of: Literal["fraction", "speedup", "pair"]
    least: float
    pair: tuple[str, str] = ("", "")
    least_bytes: float = 0.0

    def holds_for(self, case: Case) -> bool:
        if case.num_bytes < self.least_bytes or (self.of == "speedup" and not case.rival):
            return False
        return any(fnmatchcase(case.label, glob) for glob in self.labels)

    def value(self, case: Case, measured: Mapping[str, Measured]) -> float | None:
        """What is compared with `least`; None where it was not measured."""
        mine = measured.get(case.label)
        if mine is None:
            return None
        if self.of == "fraction":
            return mine.fraction
        if self.of == "speedup":
            return mine.speedup
        other = measured.get(case.label.replace(*self.pair))
        return None if other is None else other.seconds / mine.seconds


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one target: in how many of the measured cases it is reached, and the worst of them."""

    text: str
    least: float
    reached: int
    measured: int
    worst: float
    where: str

    @property
    def row(self) -> list[str]:
        """For a table: target, reached in, worst, where."""
        if not self.measured:
            return [self.text, "not measured", "", ""]
        return [self.text, f"{self.reached} of {self.measured}", f"{self.worst:.2f}", self.where]


def judge(targets: Sequence[Target], cases: Sequence[Case], measured: Mapping[str, Measured]) -> list[Verdict]:
    """One verdict a target; `measured` by label."""
    return [
        _verdict(
            target.text,
            target.least,
            [(target.value(case, measured), case.label) for case in cases if target.holds_for(case)],
        )
        for target in targets
    ]


def _verdict(text: str, least: float, values: Sequence[tuple[float | None, str]]) -> Verdict:
    found = [(value, where) for value, where in values if value is not None]
    reached = sum(value >= least for value, _ in found)
    worst, where = min(found, default=(0.0, ""))
    return Verdict(text, least, reached, len(found), worst, where)


def reached_text(verdicts: Sequence[Verdict]) -> str:
    compared = [verdict for verdict in verdicts if verdict.measured]
    reached = sum(verdict.reached == verdict.measured for verdict in compared)
    return f"{reached} of {len(compared)} targets that were measured are reached"


@dataclass(frozen=True, slots=True)
class StepTarget:
    """What decode steps of so many `rows` are to reach: at least `least`. `model`: of that one only."""

    text: str
    rows: int
    value: Callable[[GpuTimes], float | None]
    least: float
    model: str = ""


def judge_steps(found: Mapping[str, Sequence[GpuTimes]]) -> list[Verdict]:
    """One verdict a target; the measured steps by model."""
    return [
        _verdict(
            target.text,
            target.least,
            [
                (target.value(times), f"{model}, {times.tokens} rows at {times.context}")
                for model, steps in found.items()
                for times in steps
                if target.model in ("", model) and times.phase == "decode" and times.tokens == target.rows
            ],
        )
        for target in STEP_TARGETS
    ]


def _of_kernels(times: GpuTimes) -> float | None:
    return None if times.over_kernels is None else 1 / times.over_kernels


# Those of the GPU worker's issue, on an H200; all are ratios within one run, turned so that more is better.
TARGETS = (
    Target(
        "norm, activation, RoPE, at least 64 MB moved: 0.85 of copy bandwidth",
        ("rms_norm/*", "gated_activation*/*", "bias_activation/*", "rope_and_write/*"),
        "fraction",
        0.85,
        least_bytes=64e6,
    ),
    Target(
        "prefill attention, head_dim 64: 0.9 of cuDNN SDPA",
        ("prefill_attention/Llama-3.2-1B *", "prefill_attention/SmolLM2-135M *"),
        "speedup",
        0.9,
    ),
    Target(
        "prefill attention, head_dim 128: 0.75 of cuDNN SDPA",
        ("prefill_attention/Llama-3.1-8B *", "prefill_attention/Qwen2.5-1.5B *"),
        "speedup",
        0.75,
    ),
    Target(
        "decode attention, batch from 64 and context from 2k on: 0.8 of copy bandwidth",
        tuple(f"decode_attention/* {size} bfloat16*" for size in ("64x2048", "64x4096", "128x2048", "256x2048")),
        "fraction",
        0.8,
    ),
    Target("decode attention: as fast as flex attention over paged KV", ("decode_attention/*",), "speedup", 1.0),
    Target(
        "decode attention, FP8 KV at 8k: at most 0.65 of the time of bfloat16",
        ("decode_attention/* 32x8192 float8",),
        "pair",
        1 / 0.65,
        ("float8", "bfloat16"),
    ),
    *(
        Target(
            f"INT4 weights, M = {m}: {least} times cuBLAS", (f"weight_only/* square, int4 *, M {m}",), "speedup", least
        )
        for m, least in ((1, 2.5), (16, 2.0), (64, 1.2))
    ),
    Target(
        "FP8 products, M up to 16: 1.2 times torch._scaled_mm",
        ("scaled_matmul/* m=1 float8", "scaled_matmul/* m=16 float8"),
        "speedup",
        1.2,
    ),
    Target("FP8 products, M = 4096: 0.8 of torch._scaled_mm", ("scaled_matmul/* m=4096 float8",), "speedup", 0.8),
)
STEP_TARGETS = (
    StepTarget("decode step, batch 1: its kernels' times over its time at least 1 / 1.2", 1, _of_kernels, 1 / 1.2),
    StepTarget("decode step, batch 64: GPU busy at least 97%", 64, lambda times: 1 - times.idle, 0.97),
    StepTarget(
        "decode step of Llama-3.1-8B, batch 1: at least 0.8 of the bandwidth limit",
        1,
        lambda times: times.fraction,
        0.8,
        "Llama-3.1-8B",
    ),
)
