"""Idempotency keys: a request that a client sends again is answered by what the first one got, and never runs twice.

The rule, for one tenant and one key:

- while the first request runs, the same one again is refused (409): it may be sent once more a little later;
- once the first has its whole answer, the same one again gets that answer, word for word;
- when the first was aborted, failed, or its client was lost, the key is free: nobody has had an answer;
- any other request with this key is refused (400).

Keys are remembered for a time after the answer, at most so many; of answers only so many bytes, the latest (then: 409).
They live in this process: a tokenizer process that has been restarted knows none.
"""

import hashlib
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from ipc.codec import Decoder, encode
from ipc.messages import Delta, Finished, Generate, Outputs, PromptInfo
from ipc.validation import InvalidRequest

MAX_KEYS = 1 << 14
MAX_BYTES = 32 << 20  # of all answers
MAX_ANSWER_BYTES = 1 << 20

Item = Delta | Finished | PromptInfo
_Key = tuple[str, str]  # tenant, key

_decode: Decoder[Outputs] = Decoder(Outputs)


class KeyConflict(Exception):
    """409: this request ran already, or still does. `retry_after`: seconds; None when waiting does not help."""

    def __init__(self, message: str, code: str, retry_after: float | None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retry_after = retry_after


class Record:
    """What a running request with a key has been answered so far."""

    def __init__(self, keys: "IdempotencyKeys", key: _Key, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self.items: list[Item] = []
        self._keys = keys
        self._key = key

    def keep(self) -> None:
        """The answer is whole."""
        self._keys._keep(self._key, self)

    def release(self) -> None:
        """The request has ended; without `keep` the key is free again."""
        self._keys._release(self._key, self)


class _Ended(Struct, frozen=True):
    fingerprint: bytes
    at: float  # on the clock


class IdempotencyKeys:
    """All keys of this process, for `seconds` after their answers."""

    def __init__(
        self,
        seconds: float,
        *,
        max_keys: int = MAX_KEYS,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._clock = clock
        self._running: dict[_Key, Record] = {}
        self._ended: dict[_Key, _Ended] = {}  # oldest first
        self._answers: dict[_Key, bytes] = {}  # likewise
        self._bytes = 0

    def begin(self, request: Generate) -> Record | tuple[Item, ...]:
        """For a valid request with a key: where to write what it is answered, or the answer that it had already.

        `InvalidRequest` for a key of another request, `KeyConflict` where there is no answer to give.
        """
        self._forget_old()
        key = (request.tenant, request.idempotency_key)
        fingerprint = fingerprint_of(request)
        before = self._running.get(key) or self._ended.get(key)
        if before is None:
            record = self._running[key] = Record(self, key, fingerprint)
            return record
        if before.fingerprint != fingerprint:
            raise InvalidRequest(
                "idempotency_key: another request had this key; a request that differs in anything needs its own",
                "idempotency_key",
                "idempotency_key_reused",
            )
        if isinstance(before, Record):
            raise KeyConflict(
                "idempotency_key: the request with this key still runs", "idempotency_key_in_use", retry_after=1.0
            )
        if key not in self._answers:
            raise KeyConflict(
                "idempotency_key: the request with this key has been answered, and its answer is not kept any more",
                "idempotency_key_used",
                retry_after=None,
            )
        items = _decode(self._answers[key]).items
        renamed = (msgspec.structs.replace(item, request_id=request.request_id) for item in items)
        return tuple(renamed)  # type: ignore[arg-type]  # failures are not kept

    def _keep(self, key: _Key, record: Record) -> None:
        del self._running[key]
        self._ended[key] = _Ended(record.fingerprint, self._clock())
        answer = encode(Outputs(tuple(record.items)))
        if len(answer) <= MAX_ANSWER_BYTES:
            self._answers[key] = answer
            self._bytes += len(answer)
        while self._bytes > self._max_bytes:
            self._drop_answer(next(iter(self._answers)))
        self._forget_old()

    def _release(self, key: _Key, record: Record) -> None:
        if self._running.get(key) is record:
            del self._running[key]

    def _forget_old(self) -> None:
        oldest = self._clock() - self._seconds
        while self._ended:
            key, ended = next(iter(self._ended.items()))
            if ended.at > oldest and len(self._ended) <= self._max_keys:
                return
            del self._ended[key]
            self._drop_answer(key)

    def _drop_answer(self, key: _Key) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._bytes -= len(answer)


def fingerprint_of(request: Generate) -> bytes:
    """The same for requests that ask for the same: all but who asks, how urgently, and under which number."""
    bias = sorted(request.params.logit_bias.items())  # a mapping has no order
    params = msgspec.structs.replace(request.params, logit_bias={})
    asked = (request.prompt, params, bias, request.namespace, request.pooling, request.return_prompt)
    return hashlib.sha256(encode(asked)).digest()
