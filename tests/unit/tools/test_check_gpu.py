"""The check of a GPU: its report says what is wrong, which targets are reached, and what there was no time for."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_workers.backends.triton_gpu import TritonBackend
from tests.kernels.gpu.device import DEVICE
from tests.unit.gpu_workers.tiny import save_tiny
from tests.unit.tools.test_score import reference_row
from tools.bench_engine.gpu import GpuTimes
from tools.bench_kernels import __main__ as bench_kernels
from tools.bench_kernels import gpu as bench_gpu
from tools.check_gpu import __main__ as command
from tools.check_gpu import engine_parts, engine_worker, kernel_parts
from tools.check_gpu.check import Check
from tools.check_gpu.decoded import decode, mismatch
from tools.check_gpu.engine_parts import steps_section
from tools.check_gpu.kernel_parts import right_section, speed_section
from tools.check_gpu.sections import Section, markdown_table, report
from tools.check_gpu.targets import TARGETS, Target, judge
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.device import Machine, Ran
from tools.gpu_kernels.measure import GpuLimits, Measured
from tools.gpu_kernels.registry import families, load_cases
from tools.gpu_kernels.workers import LateError, LostError, Worker
from tools.score.model import assemble

MACHINE = Machine(
    {"card": "a card", "table of settings": "sm_90", "torch": "2.13.0 (CUDA 13)", "triton": "3.9.0"},
    GpuLimits(4e12, {"bfloat16": 8e14}),
)


def case(name: str, kernel: str = "scale") -> Case:
    return Case(kernel, name, {}, lambda device, seed: Prepared(lambda: None), num_bytes=4e6, rival="cuBLAS")


def ran(each: Case, seconds: float, fraction: float = 0.5, rival: float | None = None) -> Ran:
    return Ran(each, None, measured=Measured(seconds, fraction, "memory", rival))


def test_targets_are_judged_by_fraction_speedup_or_another_case() -> None:
    cases = [case("8k bf16"), case("8k fp8"), case("1k bf16"), case("1k fp8")]
    measured = {
        each.label: Measured(seconds, fraction, "memory", rival)
        for each, seconds, fraction, rival in zip(
            cases, (2.0, 1.0, 2.0, 1.5), (0.9, 0.8, 0.7, 0.6), (2.0, 3.0, None, 1.5), strict=True
        )
    }
    targets = [
        Target("of the bandwidth", ["scale/*"], "fraction", 0.75),
        Target("of the rival", ["scale/8k*"], "speedup", 2.0),
        Target("fp8", ["scale/*fp8"], "pair", 1.5, ("fp8", "bf16")),
        Target("nothing such", ["other/*"], "fraction", 1.0),
    ]
    verdicts = judge(targets, cases, measured)
    assert [verdict.row for verdict in verdicts] == [
        ["of the bandwidth", "2 of 4", "0.60", "scale/1k fp8"],
        ["of the rival", "1 of 2", "1.00", "scale/8k bf16"],
        ["fp8", "1 of 2", "1.33", "scale/1k fp8"],
        ["nothing such", "not measured", "", ""],
    ]
    del measured["scale/1k bf16"]
    assert judge(targets[2:3], cases, measured)[0].measured == 1


def test_every_target_is_that_of_a_case() -> None:
    cases = load_cases(families())
    labels = {each.label for each in cases}
    for target in TARGETS:
        for glob in target.labels:
            mine = [each for each in cases if replace(target, labels=(glob,)).holds_for(each)]
            assert mine, glob
            assert target.of != "pair" or all(
                each.label.replace(*target.pair) in labels - {each.label} for each in mine
            )


def test_the_report_begins_with_what_matters() -> None:
    sections = [
        Section("One", "all good", "text of one"),
        Section("Two", "1 of 2 right", "text of two", failures=["scale/a: wrong"]),
        Section("Three", "nothing to tell"),
    ]
    text = report("A check", sections)
    assert text.splitlines()[0] == "# A check"
    order = [
        "- One: all good",
        "- Two: 1 of 2 right",
        "- Three:",
        "**Wrong**",
        "- Two: scale/a: wrong",
        "## One",
        "## Two",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert "## Three" not in text
    assert "## Targets" not in text


def test_cells_of_tables() -> None:
    assert markdown_table(["a", "b"], [["x|y", "1\n2"]]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 2 |\n"
    assert markdown_table(["a"], []) == ""


def test_what_is_wrong_is_listed() -> None:
    cases = [case("a"), case("b"), case("c"), case("left out")]
    section = right_section(
        cases, [Ran(cases[0], None, error=1e-3), Ran(cases[1], None, error=2e-2), Ran(cases[2], None, "died")]
    )
    assert section.summary == "1 of 3 cases; no time for 1 more"
    assert section.failures == ["scale/b: relative error 0.02, above 0.01", "scale/c: died"]
    assert "| scale | 3 | 2 | 0.02 | 0.01 |" in section.text


def test_an_error_that_is_no_number_is_wrong() -> None:
    assert Ran(case("a"), None, error=float("nan")).problem


def test_times_are_shown_with_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = (Target("fast", ["scale/a"], "speedup", 1.2), Target("near", ["scale/*"], "fraction", 0.5))
    monkeypatch.setattr(kernel_parts, "TARGETS", targets)
    cases = [case("a"), case("b"), case("c")]
    section = speed_section(
        cases, [ran(cases[0], 2e-6, 0.5, 2e-6), ran(cases[1], 1e-6, 0.75), Ran(cases[2], None, "too large")]
    )
    assert section.summary == "2 of 3 cases; 1 of 2 targets that were measured are reached"
    assert section.failures == ["scale/c: too large"]
    assert (
        "| scale/a | 2.0 | 2000 | 0.0 | 0.50 | memory | 1.00 | cuBLAS | 1.00 of 1.20: missed, 0.50 of 0.50: reached |"
        in (section.text)
    )


def test_steps_are_judged_by_model_and_rows() -> None:
    def times(rows: int, idle: float, fraction: float, kernels: float | None, phase: str = "decode") -> GpuTimes:
        return GpuTimes(phase, rows, 1024, 100, 4e-3, 4e-3, idle, fraction, "memory", kernels)

    section = steps_section(
        {
            "Llama-3.1-8B": [times(1, 0.1, 0.79, 4e-3), times(64, 0.04, 0.1, None)],
            "Qwen2.5-1.5B": [
                times(1, 0.1, 0.1, 2e-3),
                times(64, 0.01, 0.1, None),
                times(64, 0.5, 0.1, None, "prefill"),
            ],
        },
        {"SmolLM2-135M": "no time"},
        [],
    )
    assert [verdict.row[1:] for verdict in section.verdicts] == [
        ["1 of 2", "0.50", "Qwen2.5-1.5B, 1 rows at 1024"],
        ["1 of 2", "0.96", "Llama-3.1-8B, 64 rows at 1024"],
        ["0 of 1", "0.79", "Llama-3.1-8B, 1 rows at 1024"],
    ]
    assert section.summary == "2 of 3 models; 0 of 3 targets that were measured are reached"
    assert "Not measured: SmolLM2-135M: no time." in section.text
    assert "| Llama-3.1-8B decode 64 at 1024 | 4.00 | 16000 | 4.00 | 4.0% | - | 0.10 | memory |" in section.text


def test_why_a_rival_was_not_measured_is_shown() -> None:
    each = Ran(case("a"), None, measured=Measured(1e-6, 0.5, "memory", None, "RuntimeError: no"))
    assert "| - | cuBLAS (RuntimeError: no) |" in speed_section([each.case], [each]).text


def test_small_cases_under_the_interpreter(toy_family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.md"
    assert command.main(["--interpret", "--out", str(out)]) == 1
    text = out.read_text()
    wrong = [line.split(": ")[1] for line in text.splitlines() if line.startswith("- Kernels right: toy")]
    assert wrong == [
        "toy_scale/wrong factor",
        "toy_scale/the last value not written",
        "toy_broken/shapes that don't fit",
        "toy_deadly/ends its process",
    ]
    assert "the last value not written: relative error inf" in text
    assert "ended by signal 6" in text
    assert "7/7 toy_deadly/after that" in capsys.readouterr().err
    assert command.main(["--interpret", "--only", "toy_scale/right*", "--out", str(out)]) == 0
    assert "2 of 2 cases" in out.read_text()


@pytest.mark.parametrize(
    ("main", "arguments"), [(command.main, ["--out", "/tmp/report.md"]), (bench_kernels.main, ["--device", "cuda"])]
)
def test_without_a_gpu_one_line_says_so(
    main: Callable[[list[str]], int],
    arguments: list[str],
    toy_family: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no GPU" in line
    assert "tools.compile_kernels" in line


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, toy_family: str) -> None:
    """Stands for a GPU on which the toy kernels run."""

    def run_cases(
        process: object, units: Sequence[tuple[Case, int | None]], modules: Sequence[str], **asked: Any
    ) -> list[Ran]:
        measured = Measured(1e-6, 0.75, "memory") if asked.get("seconds") else None
        errors = {"wrong factor": 0.5} if asked.get("check") else {}
        return [Ran(each, None, "", errors.get(each.name, 0.0), measured) for each, _ in units]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_MODEL", Path("none.gguf"))
    for module in (command, bench_gpu):
        monkeypatch.setattr(module, "machine_of", lambda process: MACHINE)
    for module in (kernel_parts, bench_gpu):
        monkeypatch.setattr(module, "run_cases", run_cases)
    monkeypatch.setattr(kernel_parts, "compile_cases", lambda *_, **__: [])
    step = asdict(GpuTimes("decode", 1, 1024, 100, 4e-3, 3.9e-3, 0.01, 0.85, "memory", 3.5e-3))
    monkeypatch.setattr(Worker, "ask", lambda self, request, seconds: iter([{"times": [step]}]))


@pytest.mark.usefixtures("gpu")
def test_command_writes_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.md"
    assert command.main(["--only", "toy_scale/right*", "--out", str(out)]) == 0
    text = out.read_text()
    assert text.startswith("# GPU check: a card\n")
    assert "- Kernels right: 2 of 2 cases\n" in text
    assert "- Engine right: not checked, since" in text
    assert "- Speed: 2 of 2 cases" in text
    assert "- Engine's steps: 3 of 3 models; 2 of 2 targets that were measured are reached" in text
    assert "| copy bandwidth, measured | 4000 GB/s |" in text
    assert f"written: {out}" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
def test_what_is_wrong_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.md"
    assert command.main(["--only", "toy_scale/*r*", "--out", str(out)]) == 1
    text = out.read_text()
    assert "- Kernels right: 3 of 4 cases\n" in text
    assert "- Speed: 3 of 3 cases;" in text
    assert "| toy_scale/wrong factor |" not in text
    assert "wrong: Kernels right: toy_scale/wrong factor: relative error 0.5, above 0.01" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_can_not_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(process: object) -> Machine:
        raise LostError("its process ended with 1: CUDA error")

    for module in (command, bench_gpu):
        monkeypatch.setattr(module, "machine_of", lost)
    assert command.main(["--out", str(tmp_path / "report.md")]) == 2
    assert bench_kernels.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err.count("the GPU can't be used: its process ended with 1: CUDA error") == 2


@pytest.mark.usefixtures("gpu")
def test_bench_kernels_prints_and_writes_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "results.json"
    arguments = ["--device", "cuda", "--only", "toy_scale/right*", "--json", str(written)]
    assert bench_kernels.main(arguments) == 0
    content = json.loads(written.read_text())
    assert [each["name"] for each in content["cases"]] == ["toy_scale/right", "toy_scale/right, with larger blocks"]
    assert content["cases"][0]["fraction"] == 0.75
    assert content["limits"]["copy_bytes"] == 4e12
    out = capsys.readouterr().out
    assert out.splitlines()[-2].split() == ["toy_scale/right", "1.0", "8", "0.0", "0.75", "memory", "-"]


@pytest.fixture
def answers(tmp_path: Path) -> list[dict[str, Any]]:
    """Of the engine's process, on the CPU, to two rows; the last step of the second one is wrong."""
    model = save_tiny(tmp_path)
    rows = [reference_row(model, name, [5, 17, 99], 4) for name in ("R0", "R1")]
    rows[1]["output_ids"][-1] = (rows[1]["output_ids"][-1] + 1) % 131
    rows[1]["margins"][-1] = 5.0
    reference = tmp_path / "rows.jsonl"
    reference.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(engine_worker.answers({"model": str(tmp_path), "reference": str(reference), "device": "cpu"}))


def test_decoding_in_graphs_with_two_steps_on_their_way(tmp_path: Path) -> None:
    """Of rows that end one after the other, so that batches run in ever smaller graphs."""
    oracle = save_tiny(tmp_path, hidden_size=96)
    model = assemble(tmp_path, TritonBackend(DEVICE, torch.float32, False, False, "float32"), "none")
    rows = [
        reference_row(oracle, name, prompt, outputs)
        for name, prompt, outputs in (("R0", [5, 17, 99], 6), ("R1", [8] * 20, 1), ("R2", [3, 2], 4))
    ]
    assert decode(model, rows) == [row["output_ids"] for row in rows]


def test_decoding_is_right_up_to_a_close_choice() -> None:
    row = {"id": "R", "output_ids": [1, 2, 3], "margins": [4.0, 0.1, 4.0]}
    assert mismatch(row, [1, 2, 3], 0.5) == ""
    assert mismatch(row, [1, 9, 9], 0.5) == ""
    assert mismatch(row, [1, 9, 9], 0.05) == "R decoded step 1: 9 for 2, margin 0.100"
    assert mismatch(row, [1, 2, 9], 0.5) == "R decoded step 2: 9 for 3, margin 4.000"


def check(tmp_path: Path) -> Check:
    return Check([], [], Worker("none"), MACHINE, tmp_path, tmp_path / "rows.jsonl")


def test_rows_of_the_engine(answers: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(row["steps"], len(row["mismatches"])) for row in answers] == [(4, 0), (4, 2)]
    monkeypatch.setattr(Worker, "ask", lambda self, request, seconds: iter(answers))
    section = engine_parts.rows_right(check(tmp_path), time.monotonic() + 60)
    assert section.summary.startswith("2 of 2 rows of the reference, 8 steps, 2 failures")
    scored, decoded = section.failures
    assert scored.startswith("R1 step 3: ")
    assert decoded.startswith("R1 decoded step 3: ")
    section = engine_parts.rows_right(check(tmp_path), time.monotonic())
    assert section.summary.startswith("1 of 2 rows")


def test_an_engine_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (answer,) = engine_worker.answers({"model": str(tmp_path), "reference": "", "device": "none"})
    assert "failed" in answer
    monkeypatch.setattr(Worker, "ask", lambda self, request, seconds: iter([answer]))
    section = engine_parts.rows_right(check(tmp_path), time.monotonic() + 60)
    assert section.failures == [answer["failed"]]


@pytest.mark.parametrize(("seconds", "hangs"), [(20, False), (600, True)])
def test_an_engine_for_which_there_was_no_time_is_not_wrong(
    seconds: float, hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles for the first time may take longer than the limit leaves; what had minutes hangs."""

    def ask(self: Worker, request: object, seconds: float) -> Any:
        raise LateError("took too long")

    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.setattr(Worker, "ask", ask)
    rows = engine_parts.rows_right(check(tmp_path), time.monotonic() + seconds)
    steps = engine_parts.steps_speed(check(tmp_path), time.monotonic() + seconds)
    assert rows.failures == ["took too long"] * hangs
    assert rows.summary.endswith("; no time for more") is not hangs
    assert len(steps.failures) == 3 * hangs
    assert ("Not measured: SmolLM2-135M: no time." in steps.text) is not hangs


def test_an_engine_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: Worker, request: object, seconds: float) -> Any:
        raise LostError("died")

    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.setattr(Worker, "ask", ask)
    section = engine_parts.rows_right(check(tmp_path), time.monotonic() + 60)
    assert section.failures == ["died"]
    assert section.summary.startswith("0 of 1 rows")
