"""Files to be written later, looked at at once."""

import os
from pathlib import Path

import pytest

from config.output_files import check_apart, check_output
from config.recordings import EVENT_LOG, TRACE, Recording, check_recording
from config.sources import ConfigError
from tools.bench_kernels.__main__ import main as bench_kernels
from tools.simulate.__main__ import main as simulate


def wrong(tmp_path: Path) -> dict[str, str]:
    """Paths at which no file can be made, not even by root, and what is said of them."""
    (tmp_path / "file").write_text("something else")
    return {
        str(tmp_path / "none" / "x"): "does not exist",
        str(tmp_path / "file" / "x"): "is not a folder",
        str(tmp_path): "Is a directory",
        str(tmp_path / ("x" * 300)): "File name too long",
    }


def test_what_cannot_be_written_is_found_without_trying(tmp_path: Path) -> None:
    for path, said in wrong(tmp_path).items():
        with pytest.raises(ConfigError, match=f"^--json .*{said}"):
            check_output("--json", path)
    before = sorted(tmp_path.iterdir())
    check_output("--json", tmp_path / "new")
    check_output("--json", tmp_path / "file")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "something else"


def test_a_relative_path_counts_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_output("--json", "new")
    with pytest.raises(ConfigError, match="does not exist"):
        check_output("--json", "none/new")


def test_a_zero_byte_in_a_path_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^--json .*null byte"):
        check_output("--json", "a\0b")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_rights_are_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="may not write"):
        check_output("--json", folder / "x")


@pytest.mark.parametrize("kind", [EVENT_LOG, TRACE])
def test_only_an_earlier_recording_of_its_kind_is_replaced(tmp_path: Path, kind: Recording) -> None:
    file = tmp_path / "file"
    check_recording(kind, str(file))
    for content in (b"", kind.magic + b"rest"):
        file.write_bytes(content)
        check_recording(kind, str(file))
        assert file.read_bytes() == content
    for content in (b"my diary", (TRACE if kind is EVENT_LOG else EVENT_LOG).magic):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^{kind.flag} .*is not {kind.name}"):
            check_recording(kind, str(file))
    with pytest.raises(ConfigError, match=rf"^{kind.flag} .*is not {kind.name}"):
        check_recording(kind, "/dev/null")


@pytest.mark.parametrize("option", ["--html", "--json", "--event-log"])
def test_a_simulation_is_not_run_for_a_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 3}\n')
    for path in wrong(tmp_path):
        assert simulate(["--trace", str(trace), option, path]) == 2
        assert capsys.readouterr().err.startswith(f"error: {option} {path}: ")


def test_nor_is_a_kernel_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in wrong(tmp_path):
        with pytest.raises(SystemExit) as ended:
            bench_kernels(["--json", path])
        assert ended.value.code == 2
        assert f"error: --json {path}: " in capsys.readouterr().err


def test_files_that_are_the_same_are_told(tmp_path: Path) -> None:
    trace, link = tmp_path / "trace", tmp_path / "link"
    trace.write_text("x")
    link.symlink_to(trace)
    (tmp_path / "folder").mkdir()
    check_apart({"--trace": trace, "--json": tmp_path / "a", "--html": None, "--records": None})
    check_apart({"--json": "/dev/null", "--html": "/dev/null"})
    for same in (trace, link, tmp_path / "folder" / ".." / "trace"):
        with pytest.raises(ConfigError, match=r"--records .*: the same file as that of --trace"):
            check_apart({"--trace": trace, "--records": same})
    with pytest.raises(ConfigError, match="the same file as that of --json"):
        check_apart({"--json": tmp_path / "new", "--html": tmp_path / "new"})
