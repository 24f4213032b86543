"""Where requests come from: a trace of lengths, a file with texts or whole requests, or numbers drawn from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from tools.json_lines import LineError, Lines, decoded, text_lines
from tools.loadgen.synthetic import Arrivals, Lengths
from tools.traces import TraceError, from_zero, is_azure_csv, rows_of

_PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a source. `time`: seconds since the first; the rest as in `tools.loadgen.messages.Item`.

    `output_blocks`: of a recording, the full blocks that ended in the output, as in `tools.traces.TraceRow`.
    """

    time: float
    input_length: int = 0
    output_length: int = 0
    blocks: Sequence[int] | None = None
    block_size: int = 0
    text: str = ""
    body: bytes = b""
    path: str = ""
    output_blocks: Sequence[int] = ()


class _Text(Struct):
    """A call of an agent, as in LMCache's traces."""

    input: str
    timestamp_us: Annotated[float, Meta(ge=0, le=1e18)] | None = None


class _Batch(Struct):
    """A line of OpenAI's batch format; `timestamp` (ms) is ours."""

    url: str
    body: Raw
    timestamp: Annotated[float, Meta(ge=0, le=1e15)] | None = None


def read_source(path: Path, *, limit: int | None, length_scale: float) -> tuple[list[Request], bool]:
    """Requests in order of arrival, and whether the file says when they came. `TraceError`, `OSError`.

    `limit`: only the first ones that arrived; of a file that does not say when, the first lines.
    """
    try:
        lines = text_lines(path)
        head = next(lines, None)
        if head is None:
            raise TraceError(f"{path}: no requests in it")
        every = chain([head], lines)
        if is_azure_csv(head[1]):
            return _rows(path, every, limit, length_scale), True
        [(_, first)] = decoded(path, [head], dict[str, Any])
        found: list[Request]
        if "input_length" in first:
            return _rows(path, every, limit, length_scale), True
        if length_scale != 1:
            raise TraceError(f"{path}: it has texts, whose lengths cannot be scaled")
        if "input" in first:
            texts = list(decoded(path, every, _Text))
            if (empty := next((number for number, line in texts if not line.input), None)) is not None:
                raise TraceError(f"{path}: line {empty}: its input is empty")
            has_times = _have_times(path, "timestamp_us", [(number, line.timestamp_us) for number, line in texts])
            found = [Request((line.timestamp_us or 0.0) / 1e6, text=line.input) for _, line in texts]
            return from_zero(found)[:limit], has_times
        if "body" in first:
            batch = list(decoded(path, every, _Batch))
            has_times = _have_times(path, "timestamp", [(number, line.timestamp) for number, line in batch])
            found = [_batch_request(path, number, line) for number, line in batch]
            return from_zero(found)[:limit], has_times
        if "messages" in first or "prompt" in first:
            found = [_body_request(path, number, body) for number, body in decoded(path, every, Raw)]
            return found[:limit], False
    except LineError as error:
        raise TraceError(str(error)) from None
    raise TraceError(
        f"{path}: its first line is of no format that is known: Mooncake (input_length), Azure's CSV (TIMESTAMP, "
        "ContextTokens, GeneratedTokens), texts (input), OpenAI's batch format (body), or bodies of requests "
        "(messages or prompt)"
    )


def _have_times(path: Path, name: str, times: Sequence[tuple[int, float | None]]) -> bool:
    """Whether all lines say when their requests came; TraceError when only some do."""
    having = [number for number, time in times if time is not None]
    without = [number for number, time in times if time is None]
    if having and without:
        raise TraceError(f"{path}: line {without[0]}: it has no {name}, and line {having[0]} has one")
    return bool(having)


def _rows(path: Path, lines: Lines, limit: int | None, length_scale: float) -> list[Request]:
    return [
        Request(
            row.time,
            row.input_length,
            row.output_length,
            row.blocks,
            row.block_size,
            output_blocks=row.output_blocks,
        )
        for row in rows_of(path, lines, limit=limit, length_scale=length_scale)
    ]


def _batch_request(path: Path, number: int, line: _Batch) -> Request:
    if line.url not in _PATHS:
        raise TraceError(f"{path}: line {number}: url must be {' or '.join(_PATHS)}, not {line.url!r}")
    return replace(_body_request(path, number, line.body), time=(line.timestamp or 0.0) / 1e3, path=line.url)


def _body_request(path: Path, number: int, raw: Raw) -> Request:
    """A request whose path follows from what it has."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: line {number}: {error}") from None
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise TraceError(f"{path}: line {number}: a request has messages or a prompt")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise TraceError(f"{path}: line {number}: {name} must be 1: latencies are measured of one choice")
    prompts = body.get("prompt")
    if isinstance(prompts, list) and len(prompts) > 1 and not all(isinstance(token, int) for token in prompts):
        raise TraceError(f"{path}: line {number}: it has {len(prompts)} prompts: latencies are measured of one")
    return Request(0.0, body=bytes(raw), path=_PATHS["messages" in body])


def blocks_of_outputs(requests: Sequence[Request]) -> tuple[int, int, int]:
    """Of requests in order of arrival: full blocks of prompts, those of them that a cache would have from an earlier
    request, and those of the latter that no prompt before had, so that only an output can have left them there.

    What our prompts have in their place the server has not generated, and so does not find the first time.
    """
    prompts: set[int] = set()
    outputs: set[int] = set()
    total = shared = generated = 0
    for request in requests:
        if request.blocks is None:
            continue
        full = request.blocks[: request.input_length // request.block_size]
        total += len(full)
        shared += sum(block in prompts or block in outputs for block in full)
        generated += sum(block in outputs and block not in prompts for block in full)
        prompts.update(full)
        outputs.update(request.output_blocks)
    return total, shared, generated


def synthetic(
    count: int, arrivals: Arrivals, inputs: Lengths, outputs: Lengths, rng: np.random.Generator
) -> list[Request]:
    """So many requests that share nothing."""
    times = [0.0] * count if arrivals.users else arrivals.times(rng, count)
    lengths = zip(times, inputs(rng, count), outputs(rng, count), strict=True)
    return [Request(time, input_length, output_length) for time, input_length, output_length in lengths]


def with_arrivals(requests: Sequence[Request], arrivals: Arrivals, rng: np.random.Generator) -> list[Request]:
    """The same requests at other times."""
    times = arrivals.times(rng, len(requests))
    return [replace(request, time=time) for request, time in zip(requests, times, strict=True)]
