"""Traces of requests: when each arrives, how long its prompt and output are, and which prompts share a prefix.

Formats, told apart by their content:
- Mooncake (FAST '25), one JSON object a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: the
  prompt's blocks of `block_size` tokens (512 unless the line says otherwise). Equal ids are equal tokens.
- Azure LLM inference (Splitwise, ISCA '24): the same without `hash_ids`; no two prompts share anything.
- Event logs of our own scheduler: see `tools.simulate.replay`.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from tools.json_lines import LineError, json_lines

OUTPUT_TOKEN = 0  # what a simulated model says; no prompt contains it
VOCABULARY = (1 << 31) - 1  # token ids are int32
_DEFAULT_BLOCK = 512

_Count = Annotated[int, Meta(ge=1, le=1 << 24)]


class TraceError(Exception):
    """A trace that cannot be used; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt made of blocks of consecutive token ids."""

    starts: "array[int]"  # first token id of each block
    block_size: int
    length: int  # tokens; the last block may be cut


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `time`: seconds since the first."""

    time: float
    prompt: BlockPrompt | bytes  # bytes: int32 token ids
    input_length: int
    output_length: int
    outputs: bytes = b""  # int32 ids of the outputs where the trace knows them
    namespace: str = ""
    tenant: str = ""
    priority: int = 0
    ttft_target_ms: float | None = None
    pin_seconds: float = 0.0

    def token_ids(self) -> bytes:
        """The prompt, int32."""
        if isinstance(self.prompt, bytes):
            return self.prompt
        starts = np.frombuffer(self.prompt.starts, dtype=np.int64)
        tokens = starts[:, None] + np.arange(self.prompt.block_size, dtype=np.int64)
        return tokens.ravel()[: self.prompt.length].astype(np.int32).tobytes()


class _Line(Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[int] | None = None
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)] = _DEFAULT_BLOCK


class _TokenIds:
    """Hands out ranges of token ids; the same block always gets the same."""

    def __init__(self) -> None:
        self._next = OUTPUT_TOKEN + 1
        self._blocks: dict[tuple[int, int], int] = {}

    def of_block(self, block: int, size: int) -> int:
        start = self._blocks.get((block, size))
        if start is None:
            start = self._blocks[block, size] = self.fresh(size)
        return start

    def fresh(self, size: int) -> int:
        start = self._next
        self._next += size
        if self._next > VOCABULARY:
            raise TraceError(f"it has more than {VOCABULARY} different tokens; use --limit or --length-scale")
        return start


def read_trace(path: Path, *, limit: int | None = None, length_scale: float = 1.0) -> list[TraceRequest]:
    """The requests of a JSON-lines trace in order of arrival.

    `length_scale` multiplies lengths of prompts, outputs and shared blocks alike, so that prefixes stay shared.
    TraceError names the line that is wrong; OSError when the file cannot be read.
    """
    ids = _TokenIds()
    requests: list[TraceRequest] = []
    try:
        for number, line in json_lines(path, _Line):
            if len(requests) == limit:
                break
            try:
                requests.append(_request(line, ids, length_scale))
            except TraceError as error:
                raise TraceError(f"{path}: line {number}: {error}") from None
    except LineError as error:
        raise TraceError(str(error)) from None
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    return from_zero(requests)


def from_zero(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Sorted by time, which then counts from the first arrival."""
    requests = sorted(requests, key=lambda request: request.time)  # stable: the order within one moment stays
    first = requests[0].time
    return [replace(request, time=request.time - first) for request in requests]


def scaled_rate(requests: list[TraceRequest], rate_scale: float) -> list[TraceRequest]:
    """The same requests arriving `rate_scale` times as fast."""
    return [replace(request, time=request.time / rate_scale) for request in requests]


def _request(line: _Line, ids: _TokenIds, scale: float) -> TraceRequest:
    output_length = max(1, round(line.output_length * scale))
    if line.hash_ids is None:
        length = max(1, round(line.input_length * scale))
        prompt = BlockPrompt(array("q", [ids.fresh(length)]), length, length)
    else:
        blocks = -(-line.input_length // line.block_size)
        if len(line.hash_ids) < blocks:
            raise TraceError(
                f"{len(line.hash_ids)} hash_ids of {line.block_size} tokens are too few for an input_length of "
                f"{line.input_length}"
            )
        # Whole blocks are scaled as such; rounding the length alone would move the block boundaries.
        size = max(1, round(line.block_size * scale))
        rest = line.input_length - (blocks - 1) * line.block_size
        length = (blocks - 1) * size + min(size, max(1, round(rest * scale)))
        prompt = BlockPrompt(array("q", [ids.of_block(block, size) for block in line.hash_ids[:blocks]]), size, length)
    return TraceRequest(line.timestamp / 1e3, prompt, length, output_length)


def infinite_cache_hits(requests: Sequence[TraceRequest], block_size: int) -> int:
    """Prompt tokens that a prefix cache of `block_size` blocks without a limit would hold when they arrive."""
    return sum(hits for hits, _ in infinite_cache_walk(requests, block_size)) * block_size


def infinite_cache_walk(requests: Sequence[TraceRequest], block_size: int) -> Iterator[tuple[int, list[int]]]:
    """For each request: how many leading full blocks were there before, and the numbers of all its full blocks.

    A number stands for a block together with everything before it; numbers count from 0 in order of appearance.
    """
    known: dict[tuple[int | str, bytes], int] = {}
    step = block_size * 4
    for request in requests:
        tokens = request.token_ids()
        parent: int | str = request.namespace
        numbers = []
        hits = 0
        for offset in range(0, len(tokens) - step + 1, step):
            key = (parent, tokens[offset : offset + step])
            fresh = len(known)
            parent = known.setdefault(key, fresh)
            hits += parent != fresh
            numbers.append(parent)
        yield hits, numbers
