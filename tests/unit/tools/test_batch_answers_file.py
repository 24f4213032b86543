"""OUTPUT of a batch: what counts as done, what is rewritten, and what is said of files that cannot be used."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.batch.answers_file import AnswersFile
from tools.batch.errors import BatchError


def answer(custom_id: str, status: int) -> str:
    response = {"status_code": status, "request_id": "x", "body": {}}
    return json.dumps({"id": "y", "custom_id": custom_id, "response": response, "error": None}) + "\n"


def test_nothing_is_created_before_open_and_an_empty_file_counts_as_new(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    AnswersFile(path, resume=False)
    assert not path.exists()
    path.touch()
    with AnswersFile(path, resume=False) as answers:
        answers.open()
        answers.write("a", 200, b"{}")
    assert json.loads(path.read_text())["custom_id"] == "a"


@given(st.lists(st.sampled_from([200, 400, 404, 429, 500, 503])), st.booleans())
def test_resume_keeps_final_answers_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, statuses: list[int], cut_off: bool
) -> None:
    path = tmp_path_factory.mktemp("batch") / "out.jsonl"
    lines = [answer(f"r{at}", status) for at, status in enumerate(statuses)]
    before = "".join(lines) + (answer("half", 200)[:-5] if cut_off else "")
    path.write_text(before)
    final = [at for at, status in enumerate(statuses) if status in (200, 400, 404)]
    with AnswersFile(path, resume=True) as answers:
        assert answers.done == {f"r{at}" for at in final}
        assert answers.errors == sum(statuses[at] != 200 for at in final)
        assert path.read_text() == before, "nothing changes before open"
        answers.open()
        answers.write("new", 503, b'{"error": 1}')
        assert answers.errors == 1 + sum(statuses[at] != 200 for at in final)
    *kept, new = path.read_text().splitlines(keepends=True)
    assert kept == [lines[at] for at in final]
    assert json.loads(new)["custom_id"] == "new"
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize("content", ["", answer("a", 200), answer("a", 503)])
def test_two_batches_cannot_have_one_output(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with AnswersFile(path, resume=True) as first:
        for opened in (False, True):
            if opened:
                first.open()  # rewrites the file where its answer is to be replaced
            with pytest.raises(BatchError, match=r"out\.jsonl: another batch is writing to it"):
                AnswersFile(path, resume=True)
        first.write("b", 200, b"{}")
    with AnswersFile(path, resume=True) as second:
        assert "b" in second.done


def test_two_batches_cannot_begin_one_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with AnswersFile(path, resume=False) as early, AnswersFile(path, resume=True) as late:
        with AnswersFile(path, resume=False) as first:
            first.open()
            with pytest.raises(BatchError, match="another batch is writing to it"):
                early.open()
            first.write("a", 200, b"{}")
        with pytest.raises(BatchError, match="another batch has written to it meanwhile"):
            late.open()
    assert len(path.read_text().splitlines()) == 1


def test_a_file_that_is_refused_is_not_kept_locked(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(answer("a", 200))
    with pytest.raises(BatchError, match="--resume"):
        AnswersFile(path, resume=False)
    with AnswersFile(path, resume=True) as answers:
        assert answers.done == {"a"}


def test_a_link_to_the_output_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    real.write_text(answer("a", 503))
    link.symlink_to(real)
    with AnswersFile(link, resume=True) as answers:
        answers.open()
    assert link.is_symlink()
    assert real.read_text() == ""


@pytest.mark.parametrize("line", ["no json\n", "{}\n", "\n", "[" * 5000 + "\n", "\x00\x00\n"])
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "out.jsonl"
    content = answer("a", 200) + line + answer("b", 200)
    path.write_text(content)
    with pytest.raises(BatchError, match=r"out\.jsonl: line 2 is not the answer of a batch"):
        AnswersFile(path, resume=True)
    assert path.read_text() == content


@pytest.mark.parametrize("resume", [False, True])
def test_places_that_cannot_be_written_are_refused_at_once(tmp_path: Path, resume: bool) -> None:
    with pytest.raises(BatchError, match="is a directory"):
        AnswersFile(tmp_path, resume)
    with pytest.raises(BatchError, match="no such directory"):
        AnswersFile(tmp_path / "nowhere" / "out.jsonl", resume)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    answers = AnswersFile(Path("/dev/full"), resume=False)
    answers.open()
    with pytest.raises(BatchError, match="/dev/full: No space left on device"):
        answers.write("a", 200, b"{}")
    assert answers.errors == 0
