"""Settings chosen from times: the table that results is good for what was measured, and keeps what was not."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.launch import Compilation
from kernels.gpu.tables import Entry, entry_index
from tests.conftest import REPOSITORY
from tools.compile_kernels.compiled import CompiledCase
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.device import Machine, Ran
from tools.gpu_kernels.measure import GpuLimits, Measured
from tools.tune_kernels import __main__ as command
from tools.tune_kernels import measuring
from tools.tune_kernels.choosing import Point, key, retuned
from tools.tune_kernels.files import formatted, rewrite
from tools.tune_kernels.measuring import unfit_candidates

A, B, C = {"BLOCK": 64}, {"BLOCK": 128}, {"BLOCK": 256, "num_warps": 8}
SHIPPED: list[Entry] = [{"when": {"kind": "int8"}, "use": C}, {"use": A}]


def point(shape: Mapping[str, int | str], a: float = math.inf, b: float = math.inf, c: float = math.inf) -> Point:
    """A shape with the times of the settings A, B and C, those that were right."""
    times = {key(A): a, key(B): b, key(C): c}
    return Point(shape, {name: seconds for name, seconds in times.items() if seconds < math.inf})


def chosen(entries: Sequence[Entry], **shape: int | str) -> Any:
    index = entry_index(entries, shape)
    assert index is not None
    return entries[index]["use"]


def test_what_was_not_measured_stays() -> None:
    assert retuned(SHIPPED, []) == SHIPPED
    assert retuned(SHIPPED, [point({"kind": "fp8", "m": 1}, a=2.0, b=1.0)]) == [SHIPPED[0], {"use": B}]
    assert retuned(SHIPPED, [point({"kind": "fp8", "m": 1})]) == SHIPPED


def test_noise_changes_nothing() -> None:
    assert retuned([{"use": A}], [point({"m": 1}, a=1.019, b=1.0)]) == [{"use": A}]
    assert retuned([{"use": A}], [point({"m": 1}, a=1.03, b=1.0)]) == [{"use": B}]


def test_shipped_settings_that_were_wrong_do_not_stay() -> None:
    assert retuned([{"use": A}], [point({"m": 1}, b=1.0)]) == [{"use": B}]


def test_shapes_in_between_have_the_settings_of_the_nearest_one() -> None:
    points = [point({"m": 1}, a=1, b=2), point({"m": 16}, a=1, b=2), point({"m": 256}, a=2, b=1)]
    entries = retuned([{"use": A}], points)
    assert entries == [{"when": {"m": [0, 64]}, "use": A}, {"use": B}]
    # the entry's own limits stay
    entries = retuned([{"when": {"m": [1, 512]}, "use": A}, {"use": C}], points)
    assert entries == [{"when": {"m": [1, 64]}, "use": A}, {"when": {"m": [1, 512]}, "use": B}, {"use": C}]


def test_a_range_between_two_others() -> None:
    points = [point({"m": 1}, a=1, b=2), point({"m": 16}, a=3, b=1), point({"m": 256}, a=1, b=2)]
    entries = retuned([{"use": A}], points)
    assert [chosen(entries, m=m) for m in (1, 4, 5, 16, 64, 65, 10**6)] == [A, A, B, B, B, A, A]


def test_texts_are_told_apart_by_their_value() -> None:
    points = [point({"kind": kind, "m": 1}, a=a, b=b) for kind, a, b in (("x", 1, 2), ("y", 2, 1), ("z", 1, 2))]
    entries = retuned([{"use": A}], points)
    assert entries == [{"when": {"kind": "y"}, "use": B}, {"use": A}]


def test_a_compromise_where_shapes_can_not_be_told_apart() -> None:
    points = [point({"m": 1}, a=1, b=4, c=1.5), point({"m": 1}, a=4, b=1, c=1.5)]
    assert retuned([{"use": A}], points) == [{"use": C}]


def test_settings_that_were_wrong_for_one_of_the_shapes_are_not_taken_for_both() -> None:
    points = [point({"m": 1}, a=1, b=3), point({"m": 1}, b=3, c=1)]
    assert retuned([{"use": A}], points) == [{"use": B}]
    assert retuned([{"use": A}], [point({"m": 1}, b=3), point({"m": 1}, c=1)]) == [{"use": A}]  # none was


SECONDS = st.floats(1e-6, 1e-2)
POINTS = st.lists(
    st.builds(
        point,
        st.fixed_dictionaries(
            {"kind": st.sampled_from(["int8", "fp8", "bf16"]), "m": st.integers(1, 8192), "n": st.integers(0, 5)}
        ),
        SECONDS,
        SECONDS,
        SECONDS,
    ),
    max_size=12,
    unique_by=lambda each: tuple(each.shape.values()),
)


@given(POINTS)
def test_new_tables(points: list[Point]) -> None:
    """Every entry is reached by a shape, or was there before; none is worse than one choice for each entry would be."""
    entries = retuned(SHIPPED, points)
    reached = {entry_index(entries, each.shape) for each in points}
    for index, entry in enumerate(entries):
        assert index in reached or entry in SHIPPED
    assert [entry.get("when") for entry in entries if entry.get("when") in ({"kind": "int8"}, None)] == [
        {"kind": "int8"},
        None,
    ]
    for index in range(len(SHIPPED)):
        mine = [each for each in points if entry_index(SHIPPED, each.shape) == index]
        new = sum(math.log(each.seconds[key(chosen(entries, **each.shape))]) for each in mine)
        single = min(sum(math.log(each.seconds[key(use)]) for each in mine) for use in (A, B, C))
        assert new <= single + len(mine) * math.log(1.02) + 1e-9
    assert retuned(entries, points) == entries


def test_files_are_written_as_the_shipped_ones_are(tmp_path: Path) -> None:
    for file in sorted((REPOSITORY / "kernels/gpu/tables").glob("*/*.json")):
        content = json.loads(file.read_text())
        assert formatted(content["measured"], content["kernels"]) == file.read_text(), file


def test_a_file_keeps_the_kernels_that_were_not_tuned(tmp_path: Path) -> None:
    both, other, untouched = (tmp_path / name for name in ("both.json", "other.json", "untouched.json"))
    both.write_text(formatted("", {"one": SHIPPED, "two": [{"use": B}]}))
    other.write_text(formatted("before", {"three": [{"use": A}]}))
    untouched.write_text(formatted("before", {"four": [{"use": A}]}))
    assert rewrite(tmp_path, {"two": [{"use": C}], "three": [{"use": B}]}, "a card") == [both, other]
    assert json.loads(both.read_text()) == {
        "measured": "a card (two)",
        "kernels": {"one": SHIPPED, "two": [{"use": C}]},
    }
    assert json.loads(other.read_text()) == {"measured": "a card", "kernels": {"three": [{"use": B}]}}
    assert json.loads(untouched.read_text())["measured"] == "before"
    rewrite(tmp_path, {"one": [{"use": A}]}, "another")
    assert json.loads(both.read_text())["measured"] == "a card (two); another (one)"


def test_candidates_that_can_not_be_used_are_not_run() -> None:
    def each(candidate: int | None, spilled: int, shared: int, error: str = "", hot: bool = True) -> CompiledCase:
        code = Compilation("_k", {}, 4, 3, 32, spilled, shared, "x")
        case = Case("k", "hot" if hot else "cold", {}, lambda device, seed: Prepared(lambda: None), 1, hot=hot)
        return CompiledCase(case, candidate, "sm_86", [code], [], error)

    compiled = [
        each(None, 8, 0),
        each(0, 0, 99 << 10),
        each(1, 8, 0),
        each(2, 0, (99 << 10) + 1),
        each(3, 0, 0, error="no"),
        each(1, 8, 0, hot=False),
    ]
    assert unfit_candidates(compiled, "sm_86") == {
        "k/hot": {1: "spills 8 bytes", 2: "101,377 bytes of shared memory", 3: "no"}
    }


LIMITS = GpuLimits(1e12, {"bfloat16": 1e15})
# Of the toy family's settings, by number of the candidate; candidate 1 is wrong for large counts.
TIMES: dict[int | None, float] = {None: 3e-6, 0: 1e-6, 1: 0.5e-6}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, toy_family: str) -> list[Ran]:
    """Stands for a GPU on which the toy kernels run; what was run there."""
    ran: list[Ran] = []

    def run_cases(process: object, units: Sequence[tuple[Case, int | None]], *_: object, **__: object) -> list[Ran]:
        found = []
        for case, candidate in units:
            wrong = candidate == 1 and int(case.shape["count"]) > 2000
            measured = Measured(TIMES[candidate], 0.5, "memory")
            found.append(Ran(case, candidate, "", 1.0 if wrong else 0.0, measured))
        ran.extend(found)
        return found

    machine = {"card": "a card", "table of settings": "sm_90", "torch": "2 (CUDA 13)", "triton": "3"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "machine_of", lambda process: Machine(machine, LIMITS))
    monkeypatch.setattr(command, "compile_cases", lambda *_, **__: [])
    monkeypatch.setattr(measuring, "run_cases", run_cases)
    return ran


def test_command_measures_and_writes_a_table(
    gpu: list[Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    (tmp_path / "sm_90").mkdir()
    table = tmp_path / "sm_90" / "toy.json"
    table.write_text(formatted("", {"toy_scale": [{"use": {"BLOCK": 256}}]}))
    times = tmp_path / "times.json"
    assert command.main(["--only", "toy_scale/right*", "--times", str(times)]) == 0
    assert json.loads(table.read_text())["measured"] == ""  # without --write
    out = capsys.readouterr().out
    (small,) = [line for line in out.splitlines() if line.startswith("toy_scale/right ")]
    assert small.split()[-6:-2] == ["3.0", "0.5", "0.5", "+500.0%"]
    assert 'toy_scale/right, with larger blocks with {"BLOCK": 512}: relative error 1, above 0.01' in out
    assert [(ran.case.name, ran.candidate) for ran in gpu[:6]] == [
        ("right", candidate) for candidate in (None, 0, 1, None, 1, 0)
    ]

    assert command.main(["--from", str(times), "--write"]) == 0
    content = json.loads(table.read_text())
    assert content["measured"].startswith("a card, 20")
    assert content["kernels"]["toy_scale"] == [
        {"when": {"count": [0, 2000]}, "use": {"BLOCK": 512}},
        {"when": {"count": [2001, 3000]}, "use": {"BLOCK": 128}},  # no case is that long
        {"use": {"BLOCK": 64}},
    ]
    assert f"written: {table}" in capsys.readouterr().out


def test_command_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no GPU" in line
    assert "tools.compile_kernels" in line


GOOD = {"label": "rms_norm/a", "kernel": "rms_norm", "shape": {"hidden": 64}, "shipped": "{}", "problems": {}}
GOOD["seconds"] = {key(A): 1e-6}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not written by --times"),
        ("\xff", "not written by --times"),
        ("[" * 100_000, "not written by --times"),
        ("[]", "not written by --times: Expected `object`, got `array`"),
        ("{}", "not written by --times: Object missing required field `measured`"),
        ({"cases": [{}]}, "not written by --times: Object missing required field `label`"),
        ({"cases": {}}, "not written by --times: Expected `array`, got `object`"),
        ({"architecture": "sm_12"}, "there is no table for its architecture 'sm_12'"),
        ({"architecture": "../sm_90"}, "there is no table for its architecture '../sm_90'"),
        ({"architecture": ""}, "there is no table for its architecture ''"),
        ({"cases": []}, r"none of its 0 cases matches --only \*"),
        ({"cases": [GOOD | {"kernel": "other"}]}, "rms_norm/a: the table has no kernel 'other'"),
        ({"cases": [GOOD | {"shape": {"m": 64}}]}, "rms_norm/a: the table has no settings for the shape {'m': 64}"),
        ({"cases": [GOOD | {"shape": {"hidden": "x"}}]}, "rms_norm/a: the table has no settings for the shape {'hid"),
        ({"cases": [GOOD, GOOD | {"shape": {"hidden": 64, "m": 1}}]}, "rms_norm/a: its shape .* has other parameters"),
        ({"cases": [GOOD | {"seconds": {"fast": 1.0}}]}, "rms_norm/a: 'fast' are no settings"),
        ({"cases": [GOOD | {"seconds": {"[64]": 1.0}}]}, r"rms_norm/a: '\[64\]' are no settings"),
        ({"cases": [GOOD | {"seconds": {key(A): 0}}]}, "rms_norm/a: 0.0 seconds with"),
        ({"cases": [GOOD | {"seconds": {key(A): "fast"}}]}, "not written by --times: Expected `float`"),
    ],
)
def test_times_that_are_none(
    content: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "times.json"
    if isinstance(content, dict) and content:
        content = json.dumps({"measured": "", "architecture": "sm_90", "cases": [GOOD]} | content)
    wrong.write_text(content, "latin-1")
    monkeypatch.setattr(command, "rewrite", lambda *_: pytest.fail("a table was written"))
    assert command.main(["--from", str(wrong), "--write"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"tune_kernels: --from {re.escape(str(wrong))}: {said}", line)


def test_times_that_are_not_there_or_not_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.json"
    assert command.main(["--from", str(file)]) == 2
    assert capsys.readouterr().err == f"tune_kernels: --from {file}: No such file or directory\n"
    file.write_text(json.dumps({"measured": "", "architecture": "sm_90", "cases": [GOOD]}))
    assert command.main(["--from", str(file)]) == 0
    assert capsys.readouterr().err == ""
    assert command.main(["--from", str(file), "--only", "rope/*"]) == 2
    assert capsys.readouterr().err == (f"tune_kernels: --from {file}: none of its 1 cases matches --only rope/*\n")
    with pytest.raises(SystemExit) as stopped:
        command.main(["--from", str(file), "--times", str(tmp_path / "other.json")])
    assert stopped.value.code == 2
    assert "--times: not with --from" in capsys.readouterr().err


def test_a_table_that_can_not_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sm_90" / "toy.json").mkdir(parents=True)
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        command.main(["--write"])
    assert stopped.value.code == 2
    assert f"--write {tmp_path / 'sm_90' / 'toy.json'}: Is a directory" in capsys.readouterr().err


def test_no_time_for_any_case_is_no_success(
    gpu: list[Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "run_cases", lambda *_, **__: [])
    assert command.main(["--only", "toy_scale/right*", "--seconds-limit", "0.5"]) == 2
    assert "tune_kernels: --seconds-limit 0.5: no time for any of 2 cases" in capsys.readouterr().err
