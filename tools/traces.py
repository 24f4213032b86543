"""Traces of requests as files: when each arrives, how long its prompt and output are, which prompts share a prefix.

Formats, told apart by their content:
- Mooncake (FAST '25), one JSON object a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: the
  prompt's blocks of `block_size` tokens (512 unless the line says otherwise). Equal ids are equal tokens.
- Recordings of our own server (`--record`): Mooncake's, with `output_hash_ids` (the full blocks that end in the output,
  the first of which may be the prompt's last one), `output_lengths` (where there are several choices), `tenant` and
  `priority`. A request with several choices becomes as many requests that arrive together.
- Azure LLM inference (Splitwise, ISCA '24, and DynamoLLM, HPCA '25): the published CSV with the columns `TIMESTAMP`,
  `ContextTokens` and `GeneratedTokens`, or Mooncake's lines without `hash_ids`; no two prompts share anything.

Other fields and columns are ignored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from tools.json_lines import LineError, Lines, decoded, text_lines

_DEFAULT_BLOCK = 512
_MOST_TOKENS = 1 << 24  # of a prompt or an output

_Count = Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
_BlockId = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_OutputLength = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)]  # 0: it ended before its first token


_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(Exception):
    """A trace that cannot be used; the text is one line for the user."""


class Timed(Protocol):
    """A dataclass whose `time` is in seconds."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def time(self) -> float: ...


T = TypeVar("T", bound=Timed)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `time`: seconds since the first."""

    time: float
    input_length: int
    output_length: int
    blocks: Sequence[int] | None  # ids of the prompt's blocks, the last of which may be cut; None: shares with nobody
    block_size: int
    output_blocks: Sequence[int] = ()  # those that end in the output; the first may be the last one of `blocks`
    tenant: str = ""  # whose it is
    priority: int = 0


class _Line(Struct):
    timestamp: Annotated[float, Meta(ge=0, le=1e15)]
    input_length: _Count
    output_length: _OutputLength
    hash_ids: list[_BlockId] | None = None
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)] = _DEFAULT_BLOCK
    output_hash_ids: list[_BlockId] = []
    output_lengths: list[_OutputLength] = []
    # Ours are numbers; other people's traces may mean something else by these names.
    tenant: int | str | None = None
    priority: int | float | str | None = None


def read_rows(path: Path, *, limit: int | None = None, length_scale: float = 1.0) -> list[TraceRow]:
    """The requests of a trace in order of arrival; with `limit` the first ones that arrived.

    A recording has its lines in the order in which requests ended, so that all of them are read. `length_scale`
    multiplies lengths of prompts, outputs and shared blocks alike, so that prefixes stay shared.
    TraceError names the line that is wrong; OSError when the file cannot be read.
    """
    return rows_of(path, text_lines(path), limit=limit, length_scale=length_scale)


def rows_of(path: Path, lines: Lines, *, limit: int | None, length_scale: float) -> list[TraceRow]:
    """The same from the lines of `path`."""
    rows: list[TraceRow] = []
    try:
        for number, line in _decoded(path, lines):
            try:
                rows += _rows(line, length_scale)
            except TraceError as error:
                raise TraceError(f"{path}: line {number}: {error}") from None
    except LineError as error:
        raise TraceError(str(error)) from None
    if not rows:
        raise TraceError(f"{path}: no requests in it")
    return from_zero(rows)[:limit]


def is_azure_csv(head: bytes) -> bool:
    """Whether this first line of a file names the columns of Azure's traces."""
    return set(_AZURE_COLUMNS) <= set(_fields(head))


def _decoded(path: Path, lines: Lines) -> Iterator[tuple[int, _Line]]:
    """Number and value of each line of either form."""
    lines = iter(lines)
    head = next(lines, None)
    if head is None:
        return
    if is_azure_csv(head[1]):
        yield from _azure_lines(path, _fields(head[1]), lines)
    else:
        yield from decoded(path, chain([head], lines), _Line)


def _azure_lines(path: Path, columns: Sequence[str], lines: Lines) -> Iterator[tuple[int, _Line]]:
    at = [columns.index(name) for name in _AZURE_COLUMNS]
    for number, text in lines:
        fields = _fields(text)
        if len(fields) != len(columns):
            raise LineError(f"{path}: line {number}: it has {len(fields)} columns, and the first line {len(columns)}")
        timestamp, context, generated = (fields[index] for index in at)
        try:
            moment = datetime.fromisoformat(timestamp)
        except ValueError:
            raise LineError(f"{path}: line {number}: TIMESTAMP must be a date and time, not {timestamp!r}") from None
        if moment.tzinfo is None:  # the first files; the later ones say +00:00
            moment = moment.replace(tzinfo=UTC)
        named = {"timestamp": moment.timestamp() * 1e3, "input_length": context, "output_length": generated}
        try:
            yield number, msgspec.convert(named, _Line, strict=False)
        except msgspec.ValidationError as error:
            names = {"`$.input_length`": "ContextTokens", "`$.output_length`": "GeneratedTokens"}
            reason, _, field = str(error).partition(" - at ")
            raise LineError(f"{path}: line {number}: {reason} - at {names.get(field, 'TIMESTAMP')}") from None


def _fields(line: bytes) -> list[str]:
    """Of a line of CSV whose values have no commas."""
    return [field.strip().strip('"') for field in line.decode("utf-8", "replace").split(",")]


def from_zero(requests: Sequence[T]) -> list[T]:
    """Sorted by time, which then counts from the first arrival."""
    ordered = sorted(requests, key=lambda request: request.time)  # stable: the order within one moment stays
    first = ordered[0].time
    return [replace(request, time=request.time - first) for request in ordered]


def scaled_rate(requests: Sequence[T], rate_scale: float) -> list[T]:
    """The same requests arriving `rate_scale` times as fast."""
    return [replace(request, time=request.time / rate_scale) for request in requests]


def _rows(line: _Line, scale: float) -> list[TraceRow]:
    """One for each choice; what an output consisted of is known of the longest, and told of the first such."""
    # Of one that ended before its first token, as of one that had one: none can be asked for less.
    lengths = [max(1, _scaled(length, scale)) for length in line.output_lengths or [line.output_length]]
    longest = lengths.index(max(lengths))
    row = _row(line, scale)
    return [
        replace(
            row,
            output_length=length,
            output_blocks=line.output_hash_ids if choice == longest else (),
            tenant=str(line.tenant or ""),
            priority=line.priority if isinstance(line.priority, int) else 0,
        )
        for choice, length in enumerate(lengths)
    ]


def _row(line: _Line, scale: float) -> TraceRow:
    """All but what only our own recordings tell."""
    time, output_length = line.timestamp / 1e3, max(1, _scaled(line.output_length, scale))
    if line.hash_ids is None:
        length = max(1, _scaled(line.input_length, scale))
        return TraceRow(time, length, output_length, None, length)
    blocks = -(-line.input_length // line.block_size)
    if len(line.hash_ids) < blocks:
        raise TraceError(
            f"{len(line.hash_ids)} hash_ids of {line.block_size} tokens are too few for an input_length of "
            f"{line.input_length}"
        )
    # Whole blocks are scaled as such; rounding the length alone would move the block boundaries.
    size = max(1, _scaled(line.block_size, scale))
    rest = line.input_length - (blocks - 1) * line.block_size
    length = (blocks - 1) * size + min(size, max(1, _scaled(rest, scale)))
    if length > _MOST_TOKENS:
        raise TraceError(f"scaled by {scale:g} its prompt has more than {_MOST_TOKENS:,} tokens")
    return TraceRow(time, length, output_length, line.hash_ids[:blocks], size)


def _scaled(tokens: int, scale: float) -> int:
    if tokens * scale > _MOST_TOKENS:
        raise TraceError(f"{tokens:,} tokens scaled by {scale:g} are more than {_MOST_TOKENS:,}")
    return round(tokens * scale)
