"""The event log: it hides what it must, keeps what planning needs, and survives being cut off."""

import errno
import io
import os
import random
import stat
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.recordings import EVENT_LOG
from config.schema import SchedulerConfig
from ipc.codec import pack_ints, unpack_ints
from ipc.engine_messages import NewRow, PromptScores, RowFailure, RowOutput, SamplingSpec, StepPlan, StepResult, Submit
from scheduler_proc.core import SchedulerCore
from scheduler_proc.event_log import EventLog, EventLogError, Header, Recorder, create, digest_of
from scheduler_proc.events import (
    Aborted,
    Arrived,
    EngineLost,
    EngineReady,
    Event,
    PeerLost,
    SendOutputs,
    SendPlan,
    StepDone,
    Stopped,
    Tick,
)
from tools.simulate.observer import Status
from tools.simulate.replay import replay

PEERS = (b"tok0", b"tok1")
VOCABULARY = 1 << 30
FIRST_ID = 0x2A2B1C1D  # real ids are large, so that their bytes cannot turn up in a log by chance
END = FIRST_ID + 7
BLOCKS = 18
SCORE = b"\x11\x22\x33\x44"  # a float32
SAMPLING = SamplingSpec()


class Recorded:
    """A core, its recorder, and a worker that samples from few tokens, so that stop ids and shared outputs occur."""

    def __init__(self, path: Path, seed: int, **changes: object) -> None:
        plain = SchedulerConfig(max_seqs=4, max_step_tokens=24, prefill_chunk=10, block_size=4, max_queue_requests=6)
        self.config = msgspec.structs.replace(plain, event_log=str(path), **changes)
        self.core = SchedulerCore(
            self.config, num_blocks=BLOCKS, max_model_len=80, vocab_size=VOCABULARY, num_host_blocks=8
        )
        self.file = create(str(path))
        header = Header(config=self.config, num_blocks=BLOCKS, num_host_blocks=8, max_model_len=80)
        self.recorder = Recorder(self.core.handle, self.file, header, VOCABULARY)
        self.random = random.Random(seed)
        self.choices = (1,) if seed % 4 == 0 else (1, 1, 1, 2, 3, 4, 5, 6, 7)  # some models do nothing but loop
        self.plans: deque[StepPlan] = deque()
        self.rows: dict[int, NewRow] = {}
        self.time = 100.0
        self.num_plans = 0
        self.prompts: list[list[int]] = []
        self.outputs: dict[tuple[bytes, int], list[int]] = {}
        self.finished: list[str] = []  # an id may be used again once its request has ended
        self.next_id = 0
        self.ready = False

    def handle(self, event: Event) -> None:
        for command in self.recorder.handle(event):
            if isinstance(command, SendPlan):
                self.plans.append(command.plan)
                self.num_plans += 1
            elif isinstance(command, SendOutputs):
                for request_id in array("q", command.outputs.plain_ids):
                    self.outputs[command.peer, request_id].append(0)
                for row in command.outputs.rows:
                    if isinstance(row, RowOutput):
                        self.outputs[command.peer, row.request_id].extend(unpack_ints(row.token_ids))
                        if row.finish is not None:
                            self.finished.append(row.finish)

    def advance(self) -> float:
        self.time += self.random.choice((0.0, 0.001, 0.4))
        return self.time

    def arrive(self, *, duplicate: bool = False) -> None:
        pick = self.random
        prompt = list(pick.choice(self.prompts)) if self.prompts and pick.random() < 0.6 else []
        prompt = prompt[: pick.randint(0, len(prompt))] + [
            FIRST_ID + pick.randrange(9) for _ in range(pick.randint(1, 20))
        ]
        if pick.random() < 0.05:
            prompt[pick.randrange(len(prompt))] = VOCABULARY + 3
        self.prompts.append(prompt)
        peer = pick.choice(PEERS)
        if not (duplicate and self.next_id):
            self.next_id += 1
        key = (peer, self.next_id)
        self.outputs.setdefault(key, [])
        score_prompt = pick.random() < 0.2
        submit = Submit(
            self.next_id,
            pack_ints(prompt),
            pick.choice((1, 8, 30, 40)),
            pick.choice((0, 3)),
            pack_ints((END,)),
            msgspec.structs.replace(SAMPLING, prompt_logprobs=0) if score_prompt else SAMPLING,
            namespace=pick.choice(("", "salt-of-somebody")),
            external_id="call-4711-of-somebody",
            tenant=pick.choice(("", "acme-corp", "umbrella-corp")),
            priority=pick.randint(-1, 1),
            stop_on_loop=pick.choice((0, 3)),
            cache_pin_seconds=pick.choice((0.0, 0.0, 1.0)),
            score_prompt=score_prompt,
        )
        self.handle(Arrived(self.advance(), peer, submit))

    def step(self) -> None:
        if not self.plans or not self.ready:
            return
        plan = self.plans.popleft()
        sampled = sum(unpack_ints(plan.scheduled)[3::4])
        tokens = [FIRST_ID + self.random.choice(self.choices) for _ in range(sampled)]
        scores = tuple(self.scores(plan))
        completed = tuple(index for index in range(sampled) if self.random.random() < 0.02)
        failed = tuple(RowFailure(index, "of somebody") for index in range(sampled) if self.random.random() < 0.02)
        result = StepResult(
            plan.step,
            pack_ints(tokens),
            forward_us=7_000,
            prompt_scores=scores,
            completed=completed,
            failed=failed,
        )
        self.handle(StepDone(self.advance(), result))

    def scores(self, plan: StepPlan) -> Iterator[PromptScores]:
        """What a worker would say of the prompts of this step."""
        for new in plan.new_rows:
            self.rows[new.row] = new
        columns = unpack_ints(plan.scheduled)
        for index, (row, start, count) in enumerate(zip(columns[::4], columns[1::4], columns[2::4], strict=True)):
            new = self.rows[row]
            first, end = max(start, new.num_scored), min(start + count, new.num_prompt - 1)
            if new.sampling.prompt_logprobs >= 0 and first < end:
                yield PromptScores(index, first + 1, SCORE * (end - first), b"", b"", b"")

    def live(self) -> tuple[bytes, int]:
        keys = list(self.core.requests)
        return self.random.choice(keys) if keys else (PEERS[0], self.random.randint(0, 99))

    def act(self, action: str) -> None:
        if action in ("arrive", "duplicate"):
            self.arrive(duplicate=action == "duplicate")
        elif action == "abort":
            peer, request_id = self.live()
            self.handle(Aborted(self.advance(), peer, (request_id, 12_345)))
        elif action == "stop":
            peer, request_id = self.live()
            self.handle(Stopped(self.advance(), peer, request_id))
        elif action == "peer":
            self.handle(PeerLost(self.advance(), self.random.choice(PEERS)))
        elif action == "lost" and self.ready:
            self.plans.clear()
            self.ready = False
            self.handle(EngineLost(self.advance()))
        elif action == "ready" and not self.ready:
            self.ready = True
            self.handle(EngineReady(self.advance()))
        elif action == "tick":
            self.handle(Tick(self.advance()))
        else:
            self.step()

    def close(self) -> None:
        self.file.close()


ACTIONS = st.lists(
    st.sampled_from(
        ["arrive"] * 10
        + ["step"] * 60
        + ["abort", "stop", "peer", "lost", "ready", "ready", "ready", "tick", "duplicate"]
    ),
    min_size=20,
    max_size=200,
)
CONFIGS = st.fixed_dictionaries(
    {
        "kv_shortage": st.sampled_from(["wait", "recompute", "swap"]),
        "prefer": st.sampled_from(["mixed", "prefill", "decode"]),
        "policy": st.sampled_from(["fcfs", "priority", "longest-prefix", "fair", "deadline"]),
        "eviction": st.sampled_from(["lru", "lfu", "fifo"]),
        "max_itl_ms": st.sampled_from([None, 8.0]),
        "ttft_target_ms": st.sampled_from([None, 50.0]),
        "batch_wait_ms": st.sampled_from([0.0, 100.0]),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def record(path: Path, seed: int, actions: list[str], **changes: object) -> Recorded:
    recorded = Recorded(path, seed, **changes)
    for action in ["ready", *actions]:
        recorded.act(action)
    recorded.close()
    return recorded


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 30), actions=ACTIONS, changes=CONFIGS)
def test_a_replay_gives_the_same_plans_and_ends(
    folder: Path, seed: int, actions: list[str], changes: dict[str, object]
) -> None:
    path = folder / "history.log"
    recorded = record(path, seed, actions, **changes)
    result = replay(path, keep_outputs=True)
    assert result.difference == ""
    assert result.equal == result.plans == recorded.num_plans
    assert not result.log.cut
    # Not only the plans: as many tokens, and as many ends.
    observer = result.observer
    assert observer.outputs is not None
    assert sum(map(len, observer.outputs)) == sum(map(len, recorded.outputs.values()))
    ended = int((observer.status == Status.FINISHED).sum())
    stops = sum(1 for entry in result.log if isinstance(entry.event, Stopped))
    assert len(recorded.finished) <= ended <= len(recorded.finished) + stops


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), actions=ACTIONS)
def test_no_id_and_no_name_is_in_the_log(folder: Path, seed: int, actions: list[str]) -> None:
    path = folder / "hidden.log"
    record(path, seed, [*actions, "arrive", "step", "step"])
    data = path.read_bytes()
    for name in (b"somebody", b"acme", b"umbrella", os.fsencode(path)):
        assert name not in data
    assert SCORE not in data
    for token in [*range(FIRST_ID, FIRST_ID + 9)]:
        assert struct.pack("<i", token) not in data
        assert struct.pack(">i", token) not in data


def submit(request_id: int, prompt: list[int], namespace: str = "", tenant: str = "") -> Arrived:
    message = Submit(request_id, pack_ints(prompt), 4, 0, b"", SAMPLING, namespace=namespace, tenant=tenant)
    return Arrived(0.0, PEERS[0], message)


def synthetic(path: Path, events: list[Arrived]) -> list[Submit]:
    """What a log says of these arrivals."""
    config = SchedulerConfig(max_seqs=64, max_step_tokens=64, prefill_chunk=64)
    core = SchedulerCore(config, num_blocks=64, max_model_len=256, vocab_size=1000)
    with path.open("wb") as file:
        header = Header(config=config, num_blocks=64, num_host_blocks=0, max_model_len=256)
        recorder = Recorder(core.handle, file, header, 1000)
        for event in events:
            recorder.handle(event)
    return [entry.event.submit for entry in EventLog(path) if isinstance(entry.event, Arrived)]


def test_prompts_share_ids_exactly_as_far_as_they_are_equal(tmp_path: Path) -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 5], [1, 2, 3], [3, 1, 2]]
    first, second, third, fourth = (
        list(unpack_ints(message.token_ids))
        for message in synthetic(tmp_path / "log", [submit(index, prompt) for index, prompt in enumerate(prompts)])
    )
    assert first[:3] == second[:3] == third
    assert not set(first[3:]) & set(second[3:])  # after a difference all differ, equal tokens too
    assert not set(first) & set(fourth)
    assert len(set(first)) == 5
    assert all(0 < token < 1 << 31 for token in first + second + fourth)


def test_a_namespace_shares_with_itself_alone_and_names_stay_equal(tmp_path: Path) -> None:
    messages = synthetic(
        tmp_path / "log",
        [submit(0, [1, 2], "a", "t"), submit(1, [1, 2], "a", "u"), submit(2, [1, 2], "b", "t"), submit(3, [1, 2])],
    )
    ids = [message.token_ids for message in messages]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert messages[0].namespace == messages[1].namespace != messages[2].namespace
    assert messages[0].tenant == messages[2].tenant != messages[1].tenant
    assert messages[3].namespace == messages[3].tenant == ""


def test_every_log_has_its_own_key(tmp_path: Path) -> None:
    (first,) = synthetic(tmp_path / "a", [submit(0, [1, 2, 3])])
    (second,) = synthetic(tmp_path / "b", [submit(0, [1, 2, 3])])
    assert first.token_ids != second.token_ids


def test_ids_outside_the_vocabulary_are_refused_in_the_replay_too(tmp_path: Path) -> None:
    first, second = synthetic(tmp_path / "log", [submit(0, [1, 1000, 2]), submit(1, [-5])])
    assert unpack_ints(first.token_ids)[1] == -1
    assert list(unpack_ints(second.token_ids)) == [-1]
    result = replay(tmp_path / "log")
    assert result.observer.status.tolist() == [Status.REFUSED, Status.REFUSED]


def test_a_prompt_that_contains_an_output_meets_its_ids_again(tmp_path: Path) -> None:
    """Chats: the next turn's prompt is the last prompt, its output and more."""
    path = tmp_path / "log"
    recorded = Recorded(path, 0)
    recorded.act("ready")
    prompt = [FIRST_ID + 1, FIRST_ID + 2]
    sampled = []
    recorded.outputs[PEERS[0], 50] = []
    recorded.outputs[PEERS[0], 51] = []
    recorded.handle(submit(50, prompt))
    while recorded.plans:
        plan = recorded.plans.popleft()
        count = sum(unpack_ints(plan.scheduled)[3::4])
        sampled += [FIRST_ID + 20 + len(sampled) + index for index in range(count)]
        tokens = pack_ints(sampled[len(sampled) - count :])
        recorded.handle(StepDone(recorded.advance(), StepResult(plan.step, tokens)))
    assert len(sampled) == 4
    recorded.handle(submit(51, prompt + sampled))
    recorded.close()
    events = [entry.event for entry in EventLog(path)]
    outputs = [
        token for event in events if isinstance(event, StepDone) for token in unpack_ints(event.result.token_ids)
    ]
    first, second = (list(unpack_ints(event.submit.token_ids)) for event in events if isinstance(event, Arrived))
    assert second == first + outputs[:4]


@pytest.fixture(scope="module")
def log(folder: Path) -> Path:
    path = folder / "whole.log"
    record(path, 5, ["arrive", "step", "step"] * 12)
    return path


def test_a_cut_log_is_read_up_to_its_last_whole_record(log: Path, tmp_path: Path) -> None:
    data = log.read_bytes()
    entries = list(EventLog(log))
    header = 12 + int.from_bytes(data[8:12], "little")
    cut = tmp_path / "cut.log"
    seen = set()
    for length in range(header, len(data), 37):
        cut.write_bytes(data[:length])
        opened = EventLog(cut)
        found = list(opened)
        assert found == entries[: len(found)]
        seen.add(len(found))
        assert opened.cut == (header + sum_of_lengths(data, header, len(found)) != length)
    assert len(seen) > 10
    result = replay(cut)
    assert result.difference == ""
    assert 0 < result.equal <= result.plans


def sum_of_lengths(data: bytes, start: int, records: int) -> int:
    total = 0
    for _ in range(records):
        total += 4 + int.from_bytes(data[start + total : start + total + 4], "little")
    return total


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an event log"),
        (b"GGUFwhatever", "not an event log"),
        (EVENT_LOG.magic, "ends before its header"),
        (EVENT_LOG.magic + struct.pack("<I", 3) + b"\xc1\xc1\xc1", "header cannot be read"),
        (EVENT_LOG.magic + struct.pack("<I", 1 << 30), "cannot be true"),
    ],
)
def test_what_is_no_log_is_said_so(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.log"
    path.write_bytes(data)
    with pytest.raises(EventLogError, match=message):
        EventLog(path)


def test_another_version_is_named(tmp_path: Path) -> None:
    record_of_header = msgspec.msgpack.encode({"version": 99, "something": "new"})
    path = tmp_path / "new.log"
    path.write_bytes(EVENT_LOG.magic + struct.pack("<I", len(record_of_header)) + record_of_header)
    with pytest.raises(EventLogError, match="format 99; this program reads format 1"):
        EventLog(path)


def test_damage_inside_is_found_with_its_place(log: Path, tmp_path: Path) -> None:
    data = bytearray(log.read_bytes())
    start = 12 + int.from_bytes(data[8:12], "little")
    start += sum_of_lengths(data, start, 3)
    data[start + 4] = 0xC1  # never used in msgpack
    path = tmp_path / "damaged.log"
    path.write_bytes(data)
    with pytest.raises(EventLogError, match="event 4 cannot be read"):
        list(EventLog(path))


def test_another_way_to_schedule_is_found_out(log: Path, tmp_path: Path) -> None:
    """The same events into a core with other settings: the first plan that differs is named."""
    data = log.read_bytes()
    length = int.from_bytes(data[8:12], "little")
    header = msgspec.msgpack.decode(data[12 : 12 + length], type=Header)
    changed = msgspec.structs.replace(header, config=msgspec.structs.replace(header.config, prefill_chunk=3))
    encoded = msgspec.msgpack.encode(changed)
    path = tmp_path / "changed.log"
    path.write_bytes(EVENT_LOG.magic + struct.pack("<I", len(encoded)) + encoded + data[12 + length :])
    result = replay(path)
    assert result.equal < result.plans
    assert "scheduled" in result.difference
    assert "step 0" in result.difference


def test_every_part_of_a_plan_is_in_its_digest() -> None:
    plan = StepPlan(3, (), pack_ints((1,)), pack_ints((0, 2, 9)), pack_ints((0, 4, 2, 1)))
    changes = {
        "step": {"step": 4},
        "freed_rows": {"freed_rows": pack_ints((2,))},
        "new_blocks": {"new_blocks": pack_ints((0, 2, 8))},
        "scheduled": {"scheduled": pack_ints((0, 4, 2, 0))},
        "copies": {"copies_in": pack_ints((1, 2))},
    }
    same = digest_of(plan)
    assert (same.rows, same.tokens) == (1, 2)
    for part, change in changes.items():
        other = digest_of(msgspec.structs.replace(plan, **change))
        assert [name for name in same.__struct_fields__ if getattr(same, name) != getattr(other, name)] == [part]


def test_a_log_is_private_and_the_last_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    for content in (EVENT_LOG.magic + b"first", EVENT_LOG.magic + b"second"):
        with create(str(path)) as file:
            file.write(content)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == EVENT_LOG.magic + b"second"
    assert (tmp_path / "events.log.old").read_bytes() == EVENT_LOG.magic + b"first"
    with pytest.raises(OSError, match="No such file"):
        create(str(tmp_path / "nowhere" / "events.log"))


def test_nothing_else_is_moved_out_of_the_way(tmp_path: Path) -> None:
    other = tmp_path / "config.toml"
    other.write_text("[model]")
    for path in (other, tmp_path):
        with pytest.raises(FileExistsError, match="not an event log"):
            create(str(path))
    assert other.read_text() == "[model]"


class FullDisk(io.BytesIO):
    """Takes so many bytes."""

    room = 4000

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_ends_the_recording_and_not_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = SchedulerConfig(max_seqs=64, max_step_tokens=64, prefill_chunk=64)
    core = SchedulerCore(config, num_blocks=64, max_model_len=256, vocab_size=1000)
    disk = FullDisk()
    header = Header(config=config, num_blocks=64, num_host_blocks=0, max_model_len=256)
    recorder = Recorder(core.handle, disk, header, 1000)
    recorder.handle(EngineReady(0.0))
    for number in range(60):
        recorder.handle(submit(number, [1, 2, 3]))
        recorder.flush()
    assert len(core.requests) == 60
    assert [record.message.count("No space left") for record in caplog.records] == [1]
    path = tmp_path / "log"
    path.write_bytes(disk.getvalue())
    result = replay(path)
    assert result.difference == ""
    assert 10 < result.events < 61


def test_the_recorder_forgets_requests_that_have_ended() -> None:
    """Memory: what is kept for a request goes with it, however it ends."""
    config = SchedulerConfig(max_seqs=64, max_step_tokens=64, prefill_chunk=64)
    core = SchedulerCore(config, num_blocks=64, max_model_len=256, vocab_size=1000)
    recorder = Recorder(
        core.handle, io.BytesIO(), Header(config=config, num_blocks=64, num_host_blocks=0, max_model_len=256), 1000
    )
    recorder.handle(EngineReady(0.0))
    for number in range(40):
        recorder.handle(submit(number, [1, 2, 3]))
        if number % 2:
            recorder.handle(Aborted(0.0, PEERS[0], (number,)))
    recorder.handle(PeerLost(0.0, PEERS[0]))
    assert not core.requests
    assert not recorder._live
    assert not recorder._by_sampling
