"""Kernels compiled for GPUs that are not here, and what counts as an error."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kernels.gpu.launch import Compilation
from tools.compile_kernels.__main__ import main
from tools.compile_kernels.compiled import CompiledCase, report
from tools.gpu_kernels.case import Case, Prepared
from tools.gpu_kernels.registry import families, first_of_each_kernel, load_cases

TABLES = {"sm_86": {"scale": [{"when": {"m": [0, 8]}, "use": {"BLOCK": 64}}, {"use": {"BLOCK": 128}}]}}


def case(name: str, hot: bool = True, **shape: int) -> Case:
    return Case("scale", name, shape, lambda device, seed: Prepared(lambda: None), num_bytes=1, hot=hot)


def compilation(code: str, spilled: int = 0, shared: int = 0) -> Compilation:
    return Compilation("_scale", {"BLOCK": 64}, 4, 3, 32, spilled, shared, code)


def compiled(
    each: Case, *codes: Compilation, asked: Sequence[tuple[str, Mapping[str, Any]]] = (), error: str = ""
) -> CompiledCase:
    return CompiledCase(each, None, "sm_86", codes, [*asked, ("scale", each.shape)], error)


def problems(*found: CompiledCase, complete: bool = False) -> list[str]:
    return report(found, TABLES, complete).problems


def test_the_same_code_is_one_row() -> None:
    found = [compiled(case("a", m=1), compilation("x")), compiled(case("b", m=9), compilation("x"), compilation("y"))]
    result = report(found, TABLES, True)
    assert [row.compiled.hash for row in result.rows] == ["x", "y"]
    assert result.problems == []


def test_only_hot_kernels_must_not_spill() -> None:
    cold, hot = case("cold", hot=False, m=1), case("hot", m=1)
    assert problems(compiled(cold, compilation("x", spilled=8))) == []
    for order in ((cold, hot), (hot, cold)):
        (problem,) = problems(*(compiled(each, compilation("x", spilled=8)) for each in order))
        assert problem == "sm_86 _scale BLOCK=64 num_warps=4 num_stages=3: spills 8 bytes"


def test_shared_memory_is_that_of_the_architecture() -> None:
    assert problems(compiled(case("a", m=1), compilation("x", shared=99 << 10))) == []
    (problem,) = problems(compiled(case("a", hot=False, m=1), compilation("x", shared=(99 << 10) + 1)))
    assert problem.endswith("101,377 bytes of shared memory, above 101,376")


def test_a_case_that_does_not_compile() -> None:
    assert problems(compiled(case("a", m=1), error="no")) == ["sm_86 scale/a: no"]


def test_settings_that_no_case_reaches() -> None:
    found = compiled(case("a", m=9), compilation("x"))
    assert problems(found) == []  # there may be other cases
    (problem,) = problems(found, complete=True)
    assert problem.startswith("sm_86 scale: no case reaches entry 1 of its settings")
    # what the kernels of another case ask for counts
    assert problems(compiled(case("a", m=9), asked=[("scale", {"m": 8})]), complete=True) == []


def test_a_case_whose_shape_is_not_what_settings_are_chosen_by() -> None:
    wrong = CompiledCase(case("a", m=1), None, "sm_86", (), [("scale", {"n": 1})], "")
    (problem,) = problems(wrong)
    assert problem == "sm_86 scale/a: settings are asked for [('scale', {'n': 1})], not for the case's {'m': 1}"


def test_every_family_is_found_and_its_labels_are_unique() -> None:
    names = families()
    assert "tools.gpu_kernels.case" not in names
    cases = load_cases(names)
    assert len({case.label for case in cases}) == len(cases)
    assert [each.label for each in load_cases(names, "no such */*")] == []


def test_labels_that_are_there_twice_are_refused(toy_family: str) -> None:
    with pytest.raises(ValueError, match="toy_scale/right"):
        load_cases([toy_family, toy_family])


def test_the_first_case_of_each_kernel() -> None:
    other = Case("other", "a", {}, lambda device, seed: Prepared(lambda: None), num_bytes=1)
    cases = [case("a"), case("b"), other, case("c")]
    assert first_of_each_kernel(cases) == [cases[0], other]


def test_command_compiles_and_tells_all_that_is_wrong(
    toy_family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    written = tmp_path / "compiled.json"
    assert main(["--architecture", "sm_90", "gfx942", "--jobs", "1", "--json", str(written)]) == 1
    content = json.loads(written.read_text())
    codes = {
        (each["architecture"], each["constants"]["BLOCK"], each["constants"]["FACTOR"]) for each in content["compiled"]
    }
    blocks = {(256, 2), (1024, 2), (256, 3)}
    assert codes == {(name, *constants) for name in ("sm_90", "gfx942") for constants in blocks}
    assert all(each["registers"] > 0 and each["spilled_bytes"] == 0 for each in content["compiled"])
    said = [problem.partition(":")[0] for problem in content["problems"]]
    for architecture in ("sm_90", "gfx942"):
        assert f"{architecture} toy_broken/shapes that don't fit" in said
        assert f"{architecture} toy_deadly/ends its process" in said
        assert f"{architecture} toy_deadly/after that" in said  # its kernel has no table
        (unreached,) = [each for each in content["problems"] if each.startswith(f"{architecture} toy_scale: ")]
        assert "entry 2" in unreached
    captured = capsys.readouterr()
    assert f"errors: {len(content['problems'])}" in captured.out
    assert "14/14 " in captured.err


def test_the_compiler_is_told_of_no_interpreter(
    toy_family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["--architecture", "sm_90", "--jobs", "1", "--only", "toy_scale/right"]) == 0
    assert "BLOCK=256" in capsys.readouterr().out


def test_an_unknown_label_is_refused(toy_family: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "--only nothing: no case has such a label" in capsys.readouterr().err
