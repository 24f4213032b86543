"""The output of a batch: one answer a line, written as it comes, so that an interrupted batch can be resumed."""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
from msgspec import Raw, Struct

from tools.batch.errors import BatchError


class Response(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class BatchAnswer(Struct, frozen=True):
    """https://platform.openai.com/docs/api-reference/batch/request-output; `error` is kept for the form's sake."""

    id: str
    custom_id: str
    response: Response
    error: None = None


class _KnownResponse(Struct, frozen=True):
    status_code: int


class _Known(Struct, frozen=True):
    custom_id: str
    response: _KnownResponse


def _is_final(status: int) -> bool:
    """False for answers that say nothing about the request: the queue was full, or the engine failed."""
    return status != 429 and status < 500


class AnswersFile:
    """Appends answers to `path`. `done` holds the custom_ids that an earlier run has answered for good, `errors`
    counts the answers in the file that are errors.

    Nothing is created or changed before `open`. Raises `BatchError` for a file that cannot be used, or that another
    batch is using: an existing file is locked at once, a new one by `open`, until the end of the `with` block.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.done: set[str] = set()
        self.errors = 0
        self._path = path.resolve()  # rewriting must not replace a link
        self._file: BinaryIO | None = None
        self._locked: BinaryIO | None = None
        self._to_rewrite = False
        self._check()
        if not path.exists():
            return
        self._locked = self._lock()
        try:
            if resume:
                self._read()
            elif path.stat().st_size:
                raise BatchError(f"{self._path}: exists: remove it, or go on with it by --resume")
        except BaseException:
            self._locked.close()
            raise

    @property
    def opened(self) -> bool:
        return self._file is not None

    def _check(self) -> None:
        path = self._path
        if path.is_dir():
            raise BatchError(f"{path}: is a directory")
        if not path.parent.is_dir():
            raise BatchError(f"{path.parent}: there is no such directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BatchError(f"{path}: no permission to write it")

    def _lock(self) -> BinaryIO:
        """The file, open for appending; no other batch can have it until this closes."""
        try:
            file = self._path.open("ab", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    raise BlockingIOError  # another batch has just replaced it
            except BaseException:
                file.close()
                raise
        except BlockingIOError:
            raise BatchError(f"{self._path}: another batch is writing to it") from None
        except OSError as error:
            raise BatchError(f"{self._path}: {error.strerror}") from None
        return file

    def _read(self) -> None:
        for _, known in self._whole_lines():
            if _is_final(known.response.status_code):
                self.done.add(known.custom_id)
                self.errors += known.response.status_code != 200

    def _whole_lines(self) -> Iterator[tuple[bytes, _Known]]:
        """All lines but the one that an interruption cut off; notes whether some must not stay in the file."""
        decode = msgspec.json.Decoder(_Known).decode
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self._to_rewrite = True
                    return
                try:
                    known = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise BatchError(f"{self._path}: line {number} is not the answer of a batch: {error}") from None
                self._to_rewrite |= not _is_final(known.response.status_code)
                yield line, known

    def open(self) -> None:
        """Be ready to write: creates the file, or takes out of it what is to be answered again."""
        if self._locked is None:
            self._locked = self._lock()
            if os.fstat(self._locked.fileno()).st_size:
                raise BatchError(f"{self._path}: another batch has written to it meanwhile")
        try:
            if self._to_rewrite:
                self._locked = self._rewrite(self._locked)
        except OSError as error:
            raise BatchError(f"{self._path}: {error.strerror}") from None
        self._file = self._locked

    def _rewrite(self, old: BinaryIO) -> BinaryIO:
        """Put a file without the lines to be answered again in the place of `old`, under lock all the time."""
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            with new.open("xb") as file:
                for line, known in self._whole_lines():
                    if _is_final(known.response.status_code):
                        file.write(line)
                file.flush()
                os.fsync(file.fileno())
            new.chmod(self._path.stat().st_mode & 0o777)
            appending = new.open("ab", buffering=0)
            fcntl.flock(appending, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.replace(self._path)
            old.close()
            return appending
        finally:
            new.unlink(missing_ok=True)

    def write(self, custom_id: str, status: int, body: bytes) -> None:
        """Append one answer; the operating system has it when this returns. Raises `BatchError`."""
        assert self._file is not None, "open() comes first"
        response = Response(status, uuid.uuid4().hex, Raw(body))
        answer = BatchAnswer(f"batch_req_{uuid.uuid4().hex}", custom_id, response)
        rest = msgspec.json.encode(answer) + b"\n"
        start = self._file.tell()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)  # no half line that a further answer would be joined to
            raise BatchError(f"{self._path}: {error.strerror}") from None
        self.errors += status != 200

    def __enter__(self) -> "AnswersFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._locked is not None:
            self._locked.close()
