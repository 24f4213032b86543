"""The input of a batch: OpenAI's batch format, one request a line.

Everything that can be wrong with a line as a line is found before an engine starts. What is wrong with a request itself
becomes its own answer, as it would over HTTP.
"""

from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Raw, Struct

from tools.batch.errors import BatchError
from tools.json_lines import LineError, json_lines

Url = Literal["/v1/chat/completions", "/v1/completions"]


class BatchLine(Struct, frozen=True):
    """One request: https://platform.openai.com/docs/api-reference/batch/request-input"""

    custom_id: str
    url: Url
    body: Raw
    method: Literal["POST"] = "POST"


class _Stream(Struct, frozen=True):
    stream: bool | None = None


def read_requests(path: Path) -> list[BatchLine]:
    """All lines of the file; empty ones are passed over. Raises `BatchError`, which names the line, and `OSError`."""
    try:
        lines = _read(path)
    except LineError as error:
        urls = " or ".join(get_args(Url))
        raise BatchError(f"{error} (a line has custom_id, method POST, url {urls}, and body)") from None
    if not lines:
        raise BatchError(f"{path}: there is no request in the file")
    return lines


def _read(path: Path) -> list[BatchLine]:
    lines: list[BatchLine] = []
    seen: dict[str, int] = {}
    for number, line in json_lines(path, BatchLine):
        try:
            streams = msgspec.json.decode(line.body, type=_Stream).stream
        except (msgspec.DecodeError, RecursionError) as error:
            raise LineError(f"{path}: line {number}: {error}") from None
        if streams:
            raise BatchError(f"{path}: line {number}: stream is not possible in a batch")
        if line.custom_id in seen:
            first = seen[line.custom_id]
            raise BatchError(f"{path}: line {number}: custom_id {line.custom_id!r} is already used in line {first}")
        seen[line.custom_id] = number
        lines.append(line)
    return lines
