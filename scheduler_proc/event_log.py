"""Recording of the core's events, so that a run can be replayed (`python -m tools.simulate --replay`).

A log holds no text and no token ids. A token's id is replaced by 31 bits of a keyed hash (BLAKE2b, RFC 7693) of the
namespace and of all real ids up to and including it; the key is random and never written. So two requests share
synthetic ids exactly as far as they share a history, which is all that the core looks at; a prompt that contains an
earlier output meets that output's ids again. Names (namespace, tenant, external id) are hashed with the same key.

File: 8 bytes magic, then records, each with its length before it (uint32, little-endian) and encoded in msgpack: one
`Header`, then an `Entry` for each event. Of a file whose end is missing, as a killed process leaves it, all that is
whole is read.
"""

import copy
import hashlib
import logging
import secrets
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from config.recordings import EVENT_LOG, create_recording
from config.schema import SchedulerConfig
from ipc.codec import unpack_int64s, unpack_ints
from ipc.engine_messages import PromptScores, RowFailure, RowOutput, SamplingSpec, StepOutputs, StepPlan, StepResult
from ipc.messages import Failed
from scheduler_proc.events import (
    Aborted,
    Arrived,
    Command,
    EngineFailed,
    EngineLost,
    Event,
    PeerLost,
    SendOutputs,
    SendPlan,
    StepDone,
    Stopped,
)

log = logging.getLogger(__name__)

VERSION = 1
REPLAY_VOCABULARY = 1 << 31  # synthetic ids are below it

_LENGTH = struct.Struct("<I")
_MAX_RECORD = 1 << 28  # bytes: a longer one is not ours
_OUTSIDE = -1  # stands for a token id outside the vocabulary: the replaying core must refuse it as well
_DROPPED = 0  # stands for a sampled token that the core threw away; no synthetic id is 0
_MASK = 0x7FFFFFFF

_encode = msgspec.msgpack.Encoder().encode


class EventLogError(Exception):
    """A file that is no event log of this version; the text is one line for the user."""


class Header(Struct, frozen=True, kw_only=True):
    """How the recorded core was made."""

    config: SchedulerConfig
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    version: int = VERSION


class PlanDigest(Struct, frozen=True, array_like=True, gc=False):
    """A plan, reduced to what tells it from another: sizes, and 8 bytes of BLAKE2b of each part."""

    step: int
    rows: int  # scheduled
    tokens: int  # scheduled
    freed_rows: bytes
    new_rows: bytes  # row, length of the prompt and block table of each
    new_blocks: bytes
    scheduled: bytes
    copies: bytes


class Entry(Struct, frozen=True, array_like=True):
    """One event, made anonymous, and the plans it caused."""

    event: Event
    plans: tuple[PlanDigest, ...] = ()


class _Version(Struct):
    version: int


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.digest()


def digest_of(plan: StepPlan) -> PlanDigest:
    """What is recorded of `plan`; token ids and sampling settings are no part of it."""
    columns = memoryview(plan.scheduled).cast("i")
    new_rows = [part for new in plan.new_rows for part in (struct.pack("<ii", new.row, new.num_prompt), new.block_ids)]
    return PlanDigest(
        plan.step,
        len(columns) // 4,
        sum(columns[2::4].tolist()),
        _hash(plan.freed_rows),
        _hash(*new_rows),
        _hash(plan.new_blocks),
        _hash(plan.scheduled),
        _hash(plan.copies_out, plan.copies_in),
    )


def create(path: str) -> BinaryIO:
    """A new log, as `create_recording` makes it, for a `Recorder`."""
    return create_recording(EVENT_LOG, path, 1 << 20)


class _Live:
    """A request that has not ended."""

    __slots__ = ("chain", "peer", "request_id", "sampling")

    def __init__(self, peer: bytes, request_id: int, sampling: SamplingSpec, chain: "hashlib.blake2b") -> None:
        self.peer = peer
        self.request_id = request_id
        self.sampling = sampling  # an object of its own, by which plans name the request
        self.chain = chain  # hash of all its known tokens


class Recorder:
    """Stands before the core: hands it every event and writes down what came of it.

    Whose token a result's token is can be seen from outside: a plan's new rows carry the very `SamplingSpec` object of
    their request, and a token that was not dropped is among the outputs.
    """

    def __init__(
        self, handle: Callable[[Event], list[Command]], file: BinaryIO, header: Header, vocab_size: int
    ) -> None:
        """`handle`: the core's. `file`: as `create` returns it."""
        self._handle = handle
        self._file: BinaryIO | None = file
        self._vocab_size = vocab_size
        self._key = secrets.token_bytes(32)
        self._live: dict[tuple[bytes, int], _Live] = {}  # by peer and request id
        self._by_sampling: dict[int, _Live] = {}  # the same by id() of their sampling settings
        self._rows: dict[int, _Live] = {}  # the worker's rows, as the newest plan leaves them
        self._sampled: dict[int, list[_Live]] = {}  # step in flight -> whose tokens it samples, in order
        file.write(EVENT_LOG.magic)
        # The path is no setting of the core, and may tell more than the log is meant to.
        self._write(msgspec.structs.replace(header, config=msgspec.structs.replace(header.config, event_log="")))

    def handle(self, event: Event) -> list[Command]:
        """What the core's `handle` does, recorded."""
        if self._file is None:
            return self._handle(event)
        requests: list[_Live] = []
        started: _Live | None = None
        recorded = event
        match event:
            case Arrived():
                event, recorded, started = self._arrived(event)
            case StepDone():
                requests = self._sampled.pop(event.result.step, [])
            case EngineLost() | EngineFailed():
                self._sampled.clear()
        commands = self._handle(event)
        outputs = [(command.peer, command.outputs) for command in commands if isinstance(command, SendOutputs)]
        if isinstance(event, StepDone):
            recorded = self._step_done(event, requests, outputs)
        self._forget_ended(event, outputs, started)
        plans = [command.plan for command in commands if isinstance(command, SendPlan)]
        for plan in plans:
            self._planned(plan)
        self._write(Entry(recorded, tuple(digest_of(plan) for plan in plans)))
        return commands

    def flush(self) -> None:
        """Give the system what has been recorded so far; to be called about once a second, and at the end."""
        self._do_with_file(lambda file: file.flush())

    def _write(self, record: Header | Entry) -> None:
        data = _encode(record)
        self._do_with_file(lambda file: file.write(_LENGTH.pack(len(data)) + data))

    def _do_with_file(self, action: Callable[[BinaryIO], object]) -> None:
        """A full disk must not stop the server: recording ends with what could be written."""
        if self._file is None:
            return
        try:
            action(self._file)
        except OSError as error:
            log.error("the event log cannot be written any more and ends here: %s", error.strerror)
            self._file = None

    # --- what plans and outputs say ---

    def _planned(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._rows[new.row] = self._by_sampling[id(new.sampling)]
        columns = unpack_ints(plan.scheduled)
        self._sampled[plan.step] = [
            self._rows[row] for row, sample in zip(columns[::4], columns[3::4], strict=True) if sample
        ]

    def _forget_ended(self, event: Event, outputs: list[tuple[bytes, StepOutputs]], started: _Live | None) -> None:
        ended: list[tuple[bytes, int]] = []
        match event:
            case Aborted(_, peer, request_ids):
                ended += [(peer, request_id) for request_id in request_ids]
            case Stopped(_, peer, request_id):
                ended.append((peer, request_id))
            case PeerLost(_, peer):
                ended += [key for key in self._live if key[0] == peer]
        for peer, output in outputs:
            ended += [
                (peer, row.request_id) for row in output.rows if isinstance(row, Failed) or row.finish is not None
            ]
        if started is not None:
            key = (started.peer, started.request_id)
            if key in ended:
                ended.remove(key)  # refused; should its id belong to an older request, that one goes on
            else:
                self._live[key] = self._by_sampling[id(started.sampling)] = started
        for key in ended:
            gone = self._live.pop(key, None)
            if gone is not None:
                del self._by_sampling[id(gone.sampling)]

    # --- hiding ---

    def _arrived(self, event: Arrived) -> tuple[Arrived, Arrived, _Live]:
        """The event for the core, the one for the log, and what to know of the request should it be taken."""
        submit = event.submit
        sampling = copy.copy(submit.sampling)
        chain = hashlib.blake2b(submit.namespace.encode() + b"\0", key=self._key, digest_size=4)
        synthetic = msgspec.structs.replace(
            submit,
            token_ids=self._hide_prompt(chain, submit.token_ids),
            stop_token_ids=b"",
            sampling=SamplingSpec(),  # planning does not look at it
            namespace=self._hide_name(submit.namespace),
            external_id=self._hide_name(submit.external_id),
            tenant=self._hide_name(submit.tenant),
            stop_on_loop=0,
        )
        return (
            Arrived(event.time, event.peer, msgspec.structs.replace(submit, sampling=sampling)),
            Arrived(event.time, event.peer, synthetic),
            _Live(event.peer, submit.request_id, sampling, chain),
        )

    def _hide_name(self, name: str) -> str:
        """Equal names stay equal; no name stays none, since that is what most requests have."""
        return hashlib.blake2b(name.encode(), key=self._key, digest_size=8).hexdigest() if name else ""

    def _hide_prompt(self, chain: "hashlib.blake2b", tokens: bytes) -> bytes:
        """Synthetic int32 ids of `tokens`, which are added to `chain`."""
        update, snapshot = chain.update, chain.copy
        digests = []
        for offset in range(0, len(tokens), 4):
            update(tokens[offset : offset + 4])
            digests.append(snapshot().digest())
        synthetic = array("i", [number & _MASK or 1 for number in unpack_ints(b"".join(digests))])
        real = unpack_ints(tokens)
        if real and (min(real) < 0 or max(real) >= self._vocab_size):
            for index, token in enumerate(real):
                if not 0 <= token < self._vocab_size:
                    synthetic[index] = _OUTSIDE
        return synthetic.tobytes()

    def _step_done(self, event: StepDone, requests: list[_Live], outputs: list[tuple[bytes, StepOutputs]]) -> StepDone:
        result = event.result
        taken: dict[bytes, set[int]] = {}
        stopped: dict[bytes, set[int]] = {}
        for peer, output in outputs:
            taken[peer] = set(unpack_int64s(output.plain_ids))
            rows = [row for row in output.rows if isinstance(row, RowOutput)]
            taken[peer].update(row.request_id for row in rows if row.token_ids)
            stopped[peer] = {row.request_id for row in rows if row.finish == "stop"}
        tokens = result.token_ids
        synthetic = array("i", [_DROPPED]) * (len(tokens) // 4)
        ended = []
        for index, live in enumerate(requests):
            if live.request_id in taken.get(live.peer, ()):
                chain = live.chain
                chain.update(tokens[4 * index : 4 * index + 4])
                synthetic[index] = int.from_bytes(chain.copy().digest(), "little") & _MASK or 1
                if live.request_id in stopped[live.peer]:
                    ended.append(index)
        hidden = StepResult(
            result.step,
            synthetic.tobytes(),
            between_us=result.between_us,
            prepare_us=result.prepare_us,
            forward_us=result.forward_us,
            sample_us=result.sample_us,
            # How many there are is what the core looks at.
            prompt_scores=tuple(
                PromptScores(scores.index, scores.first, bytes(len(scores.chosen)), b"", b"", b"")
                for scores in result.prompt_scores
            ),
            score_us=result.score_us,
            failed=tuple(RowFailure(failure.index, "") for failure in result.failed),
        )
        return StepDone(event.time, hidden, tuple(ended))


class EventLog:
    """A recorded log. Iterating yields its entries, from the first, each time anew."""

    def __init__(self, path: Path) -> None:
        """EventLogError when it is none; OSError when it cannot be read."""
        self.path = path
        self.cut = False  # after a full iteration: the last record is not complete
        with path.open("rb") as file:
            if file.read(len(EVENT_LOG.magic)) != EVENT_LOG.magic:
                raise EventLogError(f"{path}: not an event log of the scheduler")
            record = self._next(file)
            if record is None:
                raise EventLogError(f"{path}: it ends before its header does")
            try:
                version = msgspec.msgpack.decode(record, type=_Version).version
                if version != VERSION:
                    raise EventLogError(f"{path}: written in format {version}; this program reads format {VERSION}")
                self.header = msgspec.msgpack.decode(record, type=Header)
            except msgspec.DecodeError as error:
                raise EventLogError(f"{path}: its header cannot be read: {error}") from None
            self._start = file.tell()

    def __iter__(self) -> Iterator[Entry]:
        decode = msgspec.msgpack.Decoder(Entry).decode
        number = 0
        with self.path.open("rb") as file:
            file.seek(self._start)
            while (record := self._next(file)) is not None:
                number += 1
                try:
                    yield decode(record)
                except msgspec.DecodeError as error:
                    raise EventLogError(f"{self.path}: event {number} cannot be read: {error}") from None

    def _next(self, file: BinaryIO) -> bytes | None:
        """The next record; None at the end, even when that comes too early."""
        prefix = file.read(_LENGTH.size)
        if len(prefix) == _LENGTH.size:
            (length,) = _LENGTH.unpack(prefix)
            if length > _MAX_RECORD:
                raise EventLogError(f"{self.path}: a record of {length} bytes cannot be true; the file is damaged")
            record = file.read(length)
            self.cut = len(record) < length
            return None if self.cut else record
        self.cut = bool(prefix)
        return None
