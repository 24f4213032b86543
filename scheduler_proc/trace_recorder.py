"""Records the requests that were served as a trace, in which there is no text and no token id (`--record`).

A line of JSON for each request, when it has ended, in Mooncake's format with more fields: `timestamp` (milliseconds
from the start of the recording to its arrival), `input_length`, `output_length`, `hash_ids`. A block of `block_size`
tokens has a number, by the order of appearance, and gets it again where all of the prompt up to the block's end is the
same: so the file tells which requests share a prefix, and nothing else. `output_hash_ids` are those of the full blocks
that end in the output, with which the next turn of a conversation goes on; the first may be the prompt's last one.

Blocks are known by a keyed hash of everything up to their end; its key is random and never written. Requests of
different prefix-cache namespaces share no block here either. Those long not seen are forgotten: when they return, they
get new numbers.

All of this is done on a thread, with a bounded queue before it; what does not fit is counted and left out. Of a
request of which one choice does not fit, the others are left out too: its line would say something else.
"""

import hashlib
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import msgspec
from msgspec import Struct

from config.recordings import TRACE, create_recording
from scheduler_proc.request import End, Request

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30  # of a file; then the recording ends
_MAX_WAITING = 4096  # choices that have ended and are not written yet,
_MAX_WAITING_TOKENS = 1 << 24  # and their tokens
_MAX_GROUPS = 4096  # requests some choices of which have ended, and others have not,
_MAX_GROUP_TOKENS = 1 << 24  # and the tokens of those choices
_KNOWN_BLOCKS = 1 << 19  # of each of two generations
_MAX_TENANTS = 1 << 16
_WRITE_SECONDS = 0.5
_CLOSE_SECONDS = 5.0
_BREATH_BLOCKS = 32  # hashed before the scheduler's own thread may go on


class TraceLine(Struct, omit_defaults=True):
    """One request; `block_size` comes first, by which a file of these is known. Lengths in tokens."""

    block_size: int
    timestamp: float  # milliseconds
    input_length: int
    output_length: int  # of several choices the longest, which the next fields are about
    hash_ids: list[int]  # of the prompt; the last one may be of a part of a block
    finish: End
    max_tokens: int  # that it might have had
    cached_tokens: int
    output_hash_ids: list[int] = []  # full blocks that end in the output
    n: int = 1
    output_lengths: list[int] = []  # of all choices, where there are several
    tenant: int = 0  # whose it is, numbered in order of appearance; 0: nobody's
    priority: int = 0


class BlockNumbers:
    """Numbers for blocks: equal where all up to the end of the block is equal, and the namespace."""

    def __init__(self, block_size: int) -> None:
        self._step = 4 * block_size
        self._key = secrets.token_bytes(32)
        self._recent: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}
        self._next = 0

    def fresh(self) -> int:
        """A number that nothing else has."""
        self._next += 1
        return self._next - 1

    def of(self, namespace: str, tokens: bytes) -> Iterator[int]:
        """The number of each full block of int32 `tokens`."""
        state = namespace.encode()
        for start in range(0, len(tokens) - self._step + 1, self._step):
            state = hashlib.blake2b(state + tokens[start : start + self._step], key=self._key, digest_size=16).digest()
            yield self._number(state)

    def _number(self, state: bytes) -> int:
        number = self._recent.get(state)
        if number is None:
            number = self._older.get(state)
            self._recent[state] = number = self.fresh() if number is None else number
            if len(self._recent) >= _KNOWN_BLOCKS:
                self._recent, self._older = {}, self._recent
        return number


# Of a request: the tokenizer process, which one of those that have had this name, and the id of the first choice.
_Key = tuple[bytes, int, int]


class _Ended(NamedTuple):
    """A choice, or None: it was lost."""

    key: _Key
    choices: int
    choice: tuple[Request, End] | None


class _Gone(NamedTuple):
    """A tokenizer process: no more comes of the requests that it had."""

    peer: bytes
    life: int


@dataclass(slots=True)
class _Group:
    """The choices of one request that have ended. `lost`: not all of them are known, so it is not recorded."""

    seen: int = 0
    lost: bool = False
    admitted: list[tuple[Request, End]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(request.tokens) for request, _ in self.admitted)


class TraceRecorder:
    """Give `ended` to the core, and tell `peer_lost`. Nothing here ever stops the server: what cannot be recorded is
    counted.
    """

    def __init__(self, path: str, block_size: int, max_bytes: int = MAX_BYTES) -> None:
        """OSError when the file cannot be written, or something else is there."""
        self._file: BinaryIO | None = create_recording(TRACE, path, 0)
        self._max_bytes = max_bytes
        self._block_size = block_size
        self._numbers = BlockNumbers(block_size)
        self._tenants: dict[str, int] = {"": 0}
        self._started = time.monotonic()
        self._groups: dict[_Key, _Group] = {}
        self._group_tokens = 0
        self._lives: dict[bytes, int] = {}  # of tokenizer processes: how often each has been lost
        self._written = 0  # bytes, whole lines
        # Twice as much room as choices may take: that some were lost has to fit too.
        self._queue: queue.Queue[_Ended | _Gone | None] = queue.Queue(2 * _MAX_WAITING)
        self._tokens_in = 0  # of choices that were queued,
        self._tokens_out = 0  # and that were taken
        self.lost = 0  # choices that did not fit the queue,
        self._left_out = 0  # and others of the same requests
        self._thread = threading.Thread(target=self._run, name="trace-recorder", daemon=True)
        self._thread.start()

    def ended(self, request: Request, end: End) -> None:
        """Record a choice; its `request` must not change any more."""
        tokens = len(request.tokens)
        key = (request.peer, self._lives.get(request.peer, 0), request.request_id - request.choice)
        waiting = self._tokens_in - self._tokens_out
        if self._queue.qsize() < _MAX_WAITING and waiting + tokens <= _MAX_WAITING_TOKENS:
            self._tokens_in += tokens
            self._tell(_Ended(key, request.choices, (request, end)))
            return
        if not self.lost:
            log.warning("the recorded trace cannot keep up; requests are left out of it")
        self.lost += 1
        self._tell(_Ended(key, request.choices, None))

    def peer_lost(self, peer: bytes) -> None:
        """Call it when all requests of a tokenizer process have ended with it; the next one begins its ids again."""
        life = self._lives.get(peer, 0)
        self._lives[peer] = life + 1
        self._tell(_Gone(peer, life))

    def _tell(self, message: _Ended | _Gone) -> None:
        with suppress(queue.Full):  # then the bound on groups drops what would wait for it
            self._queue.put_nowait(message)

    def close(self) -> None:
        """Write what has ended so far."""
        try:
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)
        if missing := self.lost + self._left_out:
            log.warning("%d choices of requests are not in the recorded trace", missing)

    # --- on the thread ---

    def _run(self) -> None:
        lines: list[bytes] = []
        write_at = time.monotonic() + _WRITE_SECONDS
        closing = False
        while not closing:
            try:
                match self._queue.get(timeout=_WRITE_SECONDS):
                    case None:
                        closing = True
                    case _Gone(peer, life):
                        for key in [key for key in self._groups if key[:2] == (peer, life)]:
                            self._left_out += len(self._forget(key).admitted)
                    case _Ended(key, choices, choice):
                        if choice is not None:
                            self._tokens_out += len(choice[0].tokens)
                        lines += self._take(key, choices, choice)
            except queue.Empty:
                pass
            if closing or time.monotonic() >= write_at:
                self._write(b"".join(lines))
                lines = []
                write_at = time.monotonic() + _WRITE_SECONDS

    def _take(self, key: _Key, choices: int, choice: tuple[Request, End] | None) -> list[bytes]:
        """The line of its request, if this was the last of its choices and none of them was lost."""
        if self._file is None:
            return []
        group = self._groups.setdefault(key, _Group())
        group.seen += 1
        if choice is None:
            self._left_out += len(group.admitted)
            self._group_tokens -= group.tokens
            group.lost = True
            group.admitted.clear()
        elif group.lost:
            self._left_out += 1
        elif choice[1] != "refused":
            group.admitted.append(choice)
            self._group_tokens += len(choice[0].tokens)
        if group.seen >= choices:
            self._forget(key)
            return [self._line(group.admitted)] if group.admitted else []
        while len(self._groups) > _MAX_GROUPS or self._group_tokens > _MAX_GROUP_TOKENS:
            self._left_out += len(self._forget(next(iter(self._groups))).admitted)  # the oldest
        return []

    def _forget(self, key: _Key) -> _Group:
        group = self._groups.pop(key)
        self._group_tokens -= group.tokens
        return group

    def _line(self, choices: list[tuple[Request, End]]) -> bytes:
        longest, end = max(choices, key=lambda choice: choice[0].num_outputs)
        # The last token's KV is never computed, so it is no part of a block that others can share.
        known = longest.tokens[:-1] if longest.num_outputs else longest.tokens
        numbers = []
        for number in self._numbers.of(longest.namespace, known.tobytes()):
            numbers.append(number)
            if len(numbers) % _BREATH_BLOCKS == 0:
                time.sleep(0)
        of_output = numbers[longest.num_prompt // self._block_size :]
        blocks = -(-longest.num_prompt // self._block_size)
        if len(numbers) < blocks:
            numbers.append(self._numbers.fresh())
        several = len(choices) > 1
        line = TraceLine(
            block_size=self._block_size,
            timestamp=round(1e3 * max(0.0, min(request.arrival for request, _ in choices) - self._started), 3),
            input_length=longest.num_prompt,
            output_length=longest.num_outputs,
            hash_ids=numbers[:blocks],
            finish=end,
            max_tokens=longest.last + 1 - longest.num_prompt,
            cached_tokens=min(max(0, request.cached_tokens) for request, _ in choices),
            output_hash_ids=of_output,
            n=len(choices),
            output_lengths=[request.num_outputs for request, _ in choices] if several else [],
            tenant=self._tenant(longest.tenant),
            priority=longest.priority,
        )
        return msgspec.json.encode(line) + b"\n"

    def _tenant(self, name: str) -> int:
        if len(self._tenants) >= _MAX_TENANTS:
            return self._tenants.get(name, _MAX_TENANTS)
        return self._tenants.setdefault(name, len(self._tenants))

    def _write(self, data: bytes) -> None:
        """Add whole lines to the file; when that fails, it is left with those that it has."""
        if self._file is None or not data:
            return
        if self._written + len(data) > self._max_bytes:
            self._end_recording(f"it has reached {self._max_bytes} bytes")
            return
        try:
            written = self._file.write(data)
            if written < len(data):
                written += self._file.write(data[written:])  # tells what is wrong, as a rule
        except OSError as error:
            self._end_recording(error.strerror or str(error))
            return
        if written < len(data):
            self._end_recording("not all could be written")
            return
        self._written += written

    def _end_recording(self, reason: str) -> None:
        assert self._file is not None
        log.error("the recorded trace ends here: %s", reason)
        try:
            os.ftruncate(self._file.fileno(), self._written)  # no half line
        except OSError:
            log.error("its last line may be cut")
        self._file = None
        self._groups.clear()
