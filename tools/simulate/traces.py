"""Requests for the simulated scheduler: token ids for the prompts of a trace (`tools.traces`).

Event logs of our own scheduler are read by `tools.simulate.replay`.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.traces import TraceError, TraceRow, read_rows

OUTPUT_TOKEN = 0  # what a simulated model says; no prompt contains it
VOCABULARY = (1 << 31) - 1  # token ids are int32


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt made of blocks of consecutive token ids."""

    starts: "array[int]"  # first token id of each block
    block_size: int
    length: int  # tokens; the last block may be cut

    def token_ids(self) -> bytes:
        """Int32."""
        starts = np.frombuffer(self.starts, dtype=np.int64)
        tokens = starts[:, None] + np.arange(self.block_size, dtype=np.int64)
        return tokens.ravel()[: self.length].astype(np.int32).tobytes()


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
        return self.prompt if isinstance(self.prompt, bytes) else self.prompt.token_ids()


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


def read_trace(
    path: Path, *, limit: int | None = None, length_scale: float = 1.0, known_outputs: bool = True
) -> list[TraceRequest]:
    """The requests of a JSON-lines trace in order of arrival; raises as `tools.traces.read_rows`, which scales them.

    `known_outputs`: whether the simulated model says what the trace says that the real one did, so that a next turn
    finds it in the cache. A model that the trace is sent to by `tools.loadgen` says something else.
    """
    ids = _TokenIds()
    rows = read_rows(path, limit=limit, length_scale=length_scale)
    try:
        return [
            TraceRequest(
                row.time,
                _prompt(row, ids),
                row.input_length,
                row.output_length,
                outputs=_outputs(row, ids) if known_outputs else b"",
                tenant=row.tenant,
                priority=row.priority,
            )
            for row in rows
        ]
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _prompt(row: TraceRow, ids: _TokenIds) -> BlockPrompt:
    size = row.block_size
    starts = [ids.fresh(size)] if row.blocks is None else [ids.of_block(block, size) for block in row.blocks]
    return BlockPrompt(array("q", starts), size, row.input_length)


def _outputs(row: TraceRow, ids: _TokenIds) -> bytes:
    """What the trace knows of the output: as far as it fills blocks."""
    if row.blocks is None or not row.output_blocks:
        return b""
    size, more = row.block_size, row.output_blocks
    if more[0] == row.blocks[-1]:
        more = more[1:]
    starts = array("q", [ids.of_block(block, size) for block in (*row.blocks, *more)])
    known = BlockPrompt(starts, size, min(len(starts) * size, row.input_length + row.output_length))
    return known.token_ids()[4 * row.input_length :]


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
