"""The output of a batch: one answer a line, written as it comes, so that an interrupted batch can be resumed."""

import contextlib
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

    Nothing is created or changed before `open`. Raises `BatchError` for a file that cannot be used.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.done: set[str] = set()
        self.errors = 0
        self._path = path.resolve()  # rewriting must not replace a link
        self._file: BinaryIO | None = None
        self._to_rewrite = False
        self._check(resume)
        if resume and path.exists():
            for _, known in self._whole_lines():
                if _is_final(known.response.status_code):
                    self.done.add(known.custom_id)
                    self.errors += known.response.status_code != 200

    @property
    def opened(self) -> bool:
        return self._file is not None

    def _check(self, resume: bool) -> None:
        path = self._path
        if path.is_dir():
            raise BatchError(f"{path}: is a directory")
        if not path.parent.is_dir():
            raise BatchError(f"{path.parent}: there is no such directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BatchError(f"{path}: no permission to write it")
        if not resume and path.exists() and path.stat().st_size:
            raise BatchError(f"{path}: exists: remove it, or go on with it by --resume")

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
        try:
            if self._to_rewrite:
                self._rewrite()
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise BatchError(f"{self._path}: {error.strerror}") from None

    def _rewrite(self) -> None:
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            with new.open("xb") as file:
                for line, known in self._whole_lines():
                    if _is_final(known.response.status_code):
                        file.write(line)
                file.flush()
                os.fsync(file.fileno())
            new.chmod(self._path.stat().st_mode & 0o777)
            new.replace(self._path)
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
        if self._file is not None:
            self._file.close()
