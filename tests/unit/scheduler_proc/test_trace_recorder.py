"""A recorded trace shares what the requests shared, says nothing else of them, and never stops the server."""

import errno
import json
import logging
import os
import stat
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from ipc.codec import pack_ints, unpack_ints
from ipc.engine_messages import SamplingSpec, Submit
from scheduler_proc import trace_recorder
from scheduler_proc.request import End, Request
from scheduler_proc.trace_recorder import BlockNumbers, TraceRecorder
from tools.simulate.traces import TraceRequest, infinite_cache_walk, read_trace

PEER = b"tok0"
BLOCK = 4


class Served(Struct):
    """One choice as the core leaves it at its end."""

    prompt: list[int]
    outputs: list[int]
    namespace: str = ""
    tenant: str = ""
    end: End = "stop"


def request_of(served: Served, request_id: int, arrival: float = 0.0, **fields: Any) -> Request:
    submit = Submit(
        request_id,
        pack_ints(served.prompt),
        len(served.outputs) + 3,
        0,
        b"",
        SamplingSpec(),
        served.namespace,
        tenant=served.tenant,
        **fields,
    )
    request = Request(PEER, submit, array("i", served.prompt), arrival, request_id)
    request.tokens.extend(served.outputs)
    return request


def record(path: Path, load: Sequence[Served]) -> list[dict[str, Any]]:
    recorder = TraceRecorder(str(path), BLOCK)
    for number, served in enumerate(load):
        recorder.ended(request_of(served, number), served.end)
    recorder.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def shared_blocks(histories: Sequence[tuple[str, list[int]]], prompts: Sequence[tuple[str, list[int]]]) -> list[int]:
    """For each prompt: leading full blocks that it has in common with some earlier history of its namespace."""
    counts = []
    for at, (namespace, prompt) in enumerate(prompts):
        best = 0
        for other, history in histories[:at]:
            same = 0
            while namespace == other and prompt[same : same + 1] == history[same : same + 1] != []:
                same += 1
            best = max(best, same // BLOCK)
        counts.append(best)
    return counts


LOADS = st.lists(
    st.builds(
        Served,
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        outputs=st.lists(st.integers(1, 2), max_size=10),
        namespace=st.sampled_from(["", "a"]),
        tenant=st.sampled_from(["", "x", "y"]),
    ),
    min_size=1,
    max_size=12,
)


def real(load: Sequence[Served]) -> list[TraceRequest]:
    return [
        TraceRequest(0.0, pack_ints(served.prompt), len(served.prompt), 1, namespace=served.namespace)
        for served in load
    ]


@given(LOADS)
@example([Served([1], [1] * 4), Served([1] * 4, [])])  # the output fills the prompt's last block, and no other
@settings(max_examples=60, deadline=None)
def test_what_prompts_share_is_what_their_token_ids_shared(
    tmp_path_factory: pytest.TempPathFactory, load: list[Served]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "file"
    record(path, load)
    read = read_trace(path)
    assert list(infinite_cache_walk(read, BLOCK)) == list(infinite_cache_walk(real(load), BLOCK))
    assert [request.input_length for request in read] == [len(served.prompt) for served in load]
    assert [request.output_length for request in read] == [max(1, len(served.outputs)) for served in load]
    # A next turn finds what the one before has generated, but for its last token, whose KV was never computed.
    histories = [(served.namespace, served.prompt + served.outputs[:-1]) for served in load]
    prompts = [(served.namespace, served.prompt) for served in load]
    replayed = [list(unpack_ints(request.token_ids())) for request in read]
    outputs = [list(unpack_ints(request.outputs)) for request in read]
    got = shared_blocks(
        [("", prompt + output) for prompt, output in zip(replayed, outputs, strict=True)],
        [("", prompt) for prompt in replayed],
    )
    assert got == shared_blocks(histories, prompts)


@given(LOADS, st.permutations(range(1, 1001)))
@settings(max_examples=30, deadline=None)
def test_nothing_of_a_token_id_or_a_name_is_in_it(
    tmp_path_factory: pytest.TempPathFactory, load: list[Served], ids: list[int]
) -> None:
    """Other token ids and other names, in the same places, give the same file but for the times."""
    folder = tmp_path_factory.mktemp("trace")
    disguised = [
        Served(
            [ids[token] for token in served.prompt],
            [ids[token] for token in served.outputs],
            served.namespace and "another",
            served.tenant and f"of {served.tenant}",
        )
        for served in load
    ]
    lines, others = record(folder / "one", load), record(folder / "two", disguised)
    for line in (*lines, *others):
        del line["timestamp"]
    assert lines == others


def test_a_line_has_what_is_documented_and_nothing_else(tmp_path: Path) -> None:
    (line,) = record(tmp_path / "file", [Served([7, 7, 7, 7, 8], [9, 9, 9, 9, 9], tenant="secret-name", end="length")])
    assert line.pop("timestamp") == 0.0
    assert line == {
        "block_size": BLOCK,
        "input_length": 5,
        "output_length": 5,
        "hash_ids": [0, 1],
        "output_hash_ids": [1],
        "finish": "length",
        "max_tokens": 8,
        "cached_tokens": 0,
        "tenant": 1,
    }
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_choices_become_one_line_whatever_became_of_each(tmp_path: Path) -> None:
    path = tmp_path / "file"
    recorder = TraceRecorder(str(path), BLOCK)
    lengths, ends = [3, 9, 0, 1], ["stop", "length", "refused", "abort"]
    for choice, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        served = Served([1, 2, 3], [5] * length)
        recorder.ended(request_of(served, 70 + choice, choice=choice, choices=4), end)
    recorder.ended(request_of(Served([1], []), 90), "refused")
    recorder.close()
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["n"], line["output_lengths"]) == (3, [3, 9, 1])
    assert (line["output_length"], line["finish"]) == (9, "length")
    assert [request.output_length for request in read_trace(path)] == [3, 9, 1]


def test_times_are_those_of_the_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TraceRecorder(str(tmp_path / "file"), BLOCK)
    started = recorder._started
    for number, after in enumerate((2.5, 0.25, 1.0)):
        recorder.ended(request_of(Served([1], [2]), number, started + after), "stop")
    recorder.close()
    assert [request.time for request in read_trace(tmp_path / "file")] == pytest.approx([0.0, 0.75, 2.25])


class FullDisk:
    """A file on a disk that has room for so many bytes, and then takes nothing or says so."""

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self._room = room

    def fileno(self) -> int:
        return int(self._file.fileno())

    def write(self, data: bytes) -> int:
        if self._room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: self._room]
        self._room -= len(part)
        return int(self._file.write(part))


@pytest.mark.parametrize("room", [0, 1, 150, 500])
def test_a_full_disk_ends_the_recording_with_a_whole_line_and_one_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "file"
    recorder = TraceRecorder(str(path), BLOCK)
    recorder._file = FullDisk(recorder._file, room)  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            recorder.ended(request_of(Served([1, 2, 3, number], [4]), number), "stop")
        recorder.close()
    assert [entry.message for entry in caplog.records] == ["the recorded trace ends here: No space left on device"]
    for line in path.read_text().splitlines(keepends=True):
        assert line.endswith("\n")
        json.loads(line)


def test_it_ends_at_its_greatest_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    recorder = TraceRecorder(str(path), BLOCK, max_bytes=2000)
    with caplog.at_level(logging.ERROR):
        for number in range(200):
            recorder.ended(request_of(Served([1, 2, 3, number], [4]), number), "stop")
        recorder.close()
    assert path.stat().st_size <= 2000
    assert [entry.message for entry in caplog.records] == ["the recorded trace ends here: it has reached 2000 bytes"]


def test_what_does_not_fit_the_queue_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_recorder, "_MAX_WAITING_TOKENS", 10)
    recorder = TraceRecorder(str(tmp_path / "file"), BLOCK)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            recorder.ended(request_of(Served([1] * 11, []), number), "stop")
        recorder.close()
    assert recorder.lost == 3
    assert len(caplog.records) == 2  # at the first one, and how many at the end
    assert (tmp_path / "file").read_text() == ""


class Stopped:
    """A recorder whose thread takes nothing until it is told to."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        may_go = threading.Event()
        run = TraceRecorder._run

        def wait(recorder: TraceRecorder) -> None:
            may_go.wait(10)
            run(recorder)

        monkeypatch.setattr(TraceRecorder, "_run", wait)
        self.recorder = TraceRecorder(str(path), BLOCK)
        self.path = path
        self._may_go = may_go

    def choice(self, request_id: int, choice: int, choices: int = 2, prompt: Sequence[int] = (1,)) -> None:
        served = Served(list(prompt), [5])
        self.recorder.ended(request_of(served, request_id + choice, choice=choice, choices=choices), "stop")

    def lines(self) -> list[dict[str, Any]]:
        self._may_go.set()
        self.recorder.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_request_of_which_a_choice_is_lost_is_left_out_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: int
) -> None:
    """The queue has room for 20 tokens; the choice that is lost has more."""
    monkeypatch.setattr(trace_recorder, "_MAX_WAITING_TOKENS", 20)
    stopped = Stopped(tmp_path / "file", monkeypatch)
    for choice in range(3):
        stopped.choice(70, choice, choices=3, prompt=[1] * (50 if choice == lost else 1))
    stopped.choice(90, 0, choices=1, prompt=[1, 2])
    (line,) = stopped.lines()
    assert line["input_length"] == 2
    assert stopped.recorder._groups == {}
    assert stopped.recorder._group_tokens == 0
    assert caplog.messages[-1] == "3 choices of requests are not in the recorded trace"


def test_a_full_queue_has_room_for_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_recorder, "_MAX_WAITING", 3)
    stopped = Stopped(tmp_path / "file", monkeypatch)
    for number in (0, 2, 4):
        stopped.choice(number, 0)
    for number in (0, 2, 4, 6):
        stopped.choice(number, 1)
    assert stopped.recorder.lost == 4
    assert stopped.lines() == []
    assert stopped.recorder._groups == {}  # nothing is known of the last one, whose notice did not fit either


def test_a_tokenizer_that_begins_again_meets_none_of_its_earlier_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had sent one of two choices when it died; ids begin again, and so does the recorder."""
    stopped = Stopped(tmp_path / "file", monkeypatch)
    stopped.choice(70, 1, prompt=[1, 2, 3])
    stopped.recorder.peer_lost(PEER)
    stopped.choice(70, 0, prompt=[4, 5])
    stopped.choice(70, 1, prompt=[4, 5])
    (line,) = stopped.lines()
    assert (line["input_length"], line["n"]) == (2, 2)
    assert stopped.recorder._groups == {}
    assert stopped.recorder._group_tokens == 0


@pytest.mark.parametrize(("limit", "value"), [("_MAX_GROUPS", 3), ("_MAX_GROUP_TOKENS", 7)], ids=["requests", "tokens"])
def test_requests_that_never_end_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: str, value: int
) -> None:
    """Each holds two tokens. The youngest are kept."""
    monkeypatch.setattr(trace_recorder, limit, value)
    stopped = Stopped(tmp_path / "file", monkeypatch)
    for number in range(0, 100, 2):
        stopped.choice(number, 0)
    stopped.choice(98, 1)
    (line,) = stopped.lines()
    assert line["n"] == 2
    assert list(stopped.recorder._groups) == [(PEER, 0, 94), (PEER, 0, 96)]
    assert stopped.recorder._group_tokens == 4
    assert caplog.messages == ["47 choices of requests are not in the recorded trace"]


def test_an_earlier_recording_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (line,) = record(path, [Served([1, 2], [3])])
    record(path, [Served([1], [3])])
    assert json.loads((tmp_path / "file.old").read_text()) == line
    path.write_text("my diary")
    with pytest.raises(OSError, match="not a recorded trace"):
        TraceRecorder(str(path), BLOCK)
    assert path.read_text() == "my diary"


def test_blocks_that_come_again_soon_are_known_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_recorder, "_KNOWN_BLOCKS", 8)
    numbers = BlockNumbers(1)
    favourite = list(numbers.of("", pack_ints([1])))
    for token in range(2, 100):
        assert list(numbers.of("", pack_ints([token]))) == [token - 1]
        assert list(numbers.of("", pack_ints([1]))) == favourite
        assert len(numbers._recent) + len(numbers._older) <= 16
    assert list(numbers.of("", pack_ints([2]))) == [99]  # long forgotten
