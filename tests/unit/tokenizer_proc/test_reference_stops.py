"""Stop strings cut from the reference outputs at every offset, by their real token ids.

"Must show": what is streamed is, put together, the text before the stop, however the tokens arrive, and never more of
it at any moment. The expected text comes from Python's `str.find`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ipc.codec import pack_ints
from ipc.engine_messages import RowOutput
from ipc.messages import Delta, SamplingParams
from tokenizer_proc.choice import Choice, Preparation
from tokenizer_proc.vocabulary import Vocabulary, load_vocabulary


@pytest.fixture(scope="module")
def vocabulary(model_path: Path) -> Vocabulary:
    return load_vocabulary(model_path)


@pytest.fixture(scope="module")
def rows(shared_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (shared_dir / "reference" / "greedy.jsonl").open()]
    assert len(rows) == 40
    return rows


def run(
    vocabulary: Vocabulary, row: dict[str, Any], stop: str, *, group: int = 0, include: bool = False
) -> tuple[list[str], Any]:
    """Texts of the deltas, and how the choice ended; tokens come as plain ones, or in rows of `group`."""
    params = SamplingParams(stop=(stop,), include_stop_str_in_output=include)
    choice = Choice(1, 0, row["prompt_ids"], params, vocabulary, Preparation(0.0, 0.0, 0.0))
    ids = row["output_ids"]
    texts: list[str] = []

    def note(delta: Delta | None) -> None:
        if delta is not None:
            texts.append(delta.text)

    for start in range(0, len(ids), group or 1):
        some = ids[start : start + (group or 1)]
        progress = choice.take(RowOutput(1, pack_ints(some))) if group else choice.take_plain(some[0])
        note(progress.delta)
        if progress.finished is not None:
            return texts, progress.finished
    progress = choice.take(RowOutput(1, b"", "length"))
    note(progress.delta)
    return texts, progress.finished


def whole_text(vocabulary: Vocabulary, row: dict[str, Any]) -> str:
    texts, _ = run(vocabulary, row, "\0 never")
    text = "".join(texts)
    visible = [token_id for token_id in row["output_ids"] if token_id not in vocabulary.special_ids]
    assert text == b"".join(map(vocabulary.token_bytes, visible)).decode("utf-8", "replace")
    return text


@pytest.mark.parametrize("length", [1, 3, 8])
def test_stops_at_every_offset_of_every_reference_output(
    vocabulary: Vocabulary, rows: list[dict[str, Any]], length: int
) -> None:
    """B001, B002, B003: within a token, over several, and with what stands before the stop in its token."""
    checked = inside_tokens = beyond_ascii = 0
    for row in rows:
        text = whole_text(vocabulary, row)
        boundaries = {len(whole_prefix) for whole_prefix in _prefixes(vocabulary, row)}
        # Equal strings are equal stops; where they were cut from does not matter.
        stops = {text[at : at + length]: at for at in range(len(text) - length + 1)}
        for stop, at in stops.items():
            expected = text[: text.find(stop)]
            texts, finished = run(vocabulary, row, stop)
            assert "".join(texts) == expected
            assert (finished.reason, finished.stop_reason) == ("stop", stop)
            checked += 1
            inside_tokens += at not in boundaries
            beyond_ascii += not stop.isascii()
    assert checked > 900
    assert inside_tokens > 300
    assert beyond_ascii > 15


def _prefixes(vocabulary: Vocabulary, row: dict[str, Any]) -> list[str]:
    data, found = b"", []
    for token_id in row["output_ids"]:
        data += vocabulary.token_bytes(token_id)
        found.append(data.decode("utf-8", "replace"))
    return found


def test_rows_of_several_tokens_and_included_stops_say_the_same(
    vocabulary: Vocabulary, rows: list[dict[str, Any]]
) -> None:
    """B007: with `include`, the text goes to the end of the stop string."""
    for row in rows[::4]:
        text = whole_text(vocabulary, row)
        for at in range(0, len(text) - 5, 3):
            stop = text[at : at + 5]
            end = text.find(stop)
            for group in (0, 1, 4):
                assert "".join(run(vocabulary, row, stop, group=group)[0]) == text[:end]
                assert "".join(run(vocabulary, row, stop, group=group, include=True)[0]) == text[: end + 5]


def test_nothing_leaks_of_a_stop_that_completes_later(vocabulary: Vocabulary, rows: list[dict[str, Any]]) -> None:
    """B002: after each delta, what has been shown does not reach into the stop string."""
    for row in rows[1::4]:
        text = whole_text(vocabulary, row)
        for at in range(0, len(text) - 30, 7):
            stop = text[at : at + 30]
            shown = ""
            for part in run(vocabulary, row, stop)[0]:
                shown += part
                assert text[: text.find(stop)].startswith(shown)
