"""The output of a batch: one answer a line, written as it comes, so that an interrupted batch can be resumed."""

import uuid
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
from msgspec import Raw, Struct


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


class _Known(Struct, frozen=True):
    custom_id: str


class AnswersFile:
    """Appends answers to `path`; `done` holds the custom_ids that an earlier run has answered already."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.done: set[str] = set()
        self._file: BinaryIO
        if resume and path.exists():
            whole = self._read(path)
            self._file = path.open("r+b")
            self._file.truncate(whole)  # without the line that the interruption cut off
            self._file.seek(whole)
        else:
            self._file = path.open("xb")

    def _read(self, path: Path) -> int:
        """Note what is answered; the length of the file's whole lines in bytes."""
        whole = 0
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self.done.add(msgspec.json.decode(line, type=_Known).custom_id)
                    whole += len(line)
        return whole

    def write(self, custom_id: str, status: int, body: bytes) -> None:
        """One answer, on disk when this returns."""
        response = Response(status, uuid.uuid4().hex, Raw(body))
        answer = BatchAnswer(f"batch_req_{uuid.uuid4().hex}", custom_id, response)
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()

    def __enter__(self) -> "AnswersFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
