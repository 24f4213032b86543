"""The grammars of rows: which token may come next, and when an output is all that its grammar allows.

A row's matcher is built when the row arrives, from the outputs that it has by then, so preemption and recovery need
nothing else. Building and masks run on a thread beside the forward; llguidance lets go of the interpreter meanwhile.
Whatever goes wrong with a matcher is that row's failure.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from config.grammar_errors import readable
from gpu_workers.rows import Ints, int32_columns
from gpu_workers.sampling import IntArray, PackedMask, TokenMask, limits_of
from ipc.engine_messages import NewRow, RowFailure

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from gpu_workers.grammar_engine import GrammarEngine

log = logging.getLogger(__name__)

_FAILED = "grammar: its matcher failed"
_IMPOSSIBLE = (
    "grammar: no token is left that it allows and the request's other parameters allow as well (allowed_token_ids, "
    "bad_words, stop_token_ids before min_tokens)"
)


@dataclass(slots=True, eq=False)
class _Row:
    """One row's matcher; None before it was built and after it has done its work."""

    matcher: "LLMatcher | None" = None
    problem: str = _FAILED  # why the row can't go on; what it starts with is gone once the matcher is built


class Grammars:
    """The matchers of all rows that have a grammar, on the rank that samples."""

    def __init__(self, token_table: Path, vocab_size: int, packed: bool = False) -> None:
        """`token_table`: the file that is there as soon as a request with a grammar is; `packed`: the kind of masks."""
        self._token_table = token_table
        self._packed = packed
        self._vocab_size = vocab_size
        self._engine: GrammarEngine | None = None
        self._rows: dict[int, _Row] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # its jobs run in order
        self._masks: Future[TokenMask | PackedMask | None] | None = None

    def add(self, new: NewRow) -> None:
        """Take over a new row's grammar, if it has one."""
        if new.sampling.grammar:
            row = self._rows[new.row] = _Row()
            outputs = int32_columns(new.token_ids, 1, "token_ids")[new.num_prompt :, 0].tolist()
            self._thread.submit(self._build, row, new.sampling.grammar, outputs)

    def free(self, rows: list[int]) -> None:
        """Forget these rows' grammars."""
        for row in rows:
            self._rows.pop(row, None)

    def begin(self, rows: Ints) -> None:
        """Start to compute the masks of these sampling rows; `mask` waits for them."""
        self._masks = None
        found = [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]
        if found:
            self._masks = self._thread.submit(self._compute, found)

    def mask(self) -> TokenMask | PackedMask | None:
        """What may come next in the rows that `begin` was called with; None where all of them are free."""
        return None if self._masks is None else self._masks.result()

    def any_of(self, rows: Ints) -> bool:
        """Whether one of these rows has a grammar."""
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def take(
        self, rows: Ints, token_ids: IntArray, indices: IntArray
    ) -> tuple[tuple[int, ...], tuple[RowFailure, ...]]:
        """Advance the rows with these indices by one sampled token each, -1 where none was possible.

        The indices of rows whose output is now complete, and the failures. Until the scheduler knows of either, such a
        row runs in vain.
        """
        if not self._rows:
            return (), ()
        completed: list[int] = []
        failed: list[RowFailure] = []
        for index, number, token_id in zip(
            indices.tolist(), rows[indices].tolist(), token_ids[indices].tolist(), strict=True
        ):
            row = self._rows.get(number)
            if row is None:
                continue
            if token_id < 0:
                row.problem = _IMPOSSIBLE
            elif row.matcher is not None:
                if not row.matcher.consume_token(token_id):
                    row.problem = _problem(row.matcher)
                elif row.matcher.is_stopped():
                    completed.append(index)
                    row.matcher = None
            if row.problem:
                failed.append(RowFailure(index, row.problem))
                row.matcher = None
        return tuple(completed), tuple(failed)

    # --- on the thread ---

    def _build(self, row: _Row, grammar: str, outputs: list[int]) -> None:
        try:
            if self._engine is None:
                # Here, since most runs do without llguidance and the vocabulary.
                from gpu_workers.grammar_engine import GrammarEngine

                self._engine = GrammarEngine(self._token_table)
            matcher = self._engine.matcher(grammar)
            if outputs:
                matcher.consume_tokens(outputs)
            if matcher.is_error():
                row.problem = _problem(matcher)
            else:
                row.matcher, row.problem = matcher, ""
        except BaseException as error:  # a panic in llguidance is no Exception
            _log_unexpected(error)

    def _compute(self, found: list[tuple[int, _Row]]) -> TokenMask | PackedMask | None:
        live = [(index, row, row.matcher) for index, row in found if row.matcher is not None]
        if not live:
            return None
        assert self._engine is not None
        try:
            bits = self._engine.bits([matcher for _, _, matcher in live])
        except BaseException as error:  # likewise
            _log_unexpected(error)
            for _, row, _ in live:
                row.problem, row.matcher = _FAILED, None
            return None
        sound = []
        for at, (_, row, matcher) in enumerate(live):
            if matcher.is_error():
                row.problem, row.matcher = _problem(matcher), None
            else:
                sound.append(at)
        if not sound:
            return None
        indices = np.array([live[at][0] for at in sound], dtype=np.int64)
        if len(sound) < len(live):
            bits = bits[sound]
        return PackedMask(indices, bits) if self._packed else TokenMask(indices, limits_of(bits, self._vocab_size))


def _problem(matcher: "LLMatcher") -> str:
    error = matcher.get_error()
    return f"grammar: {readable(error) if error else 'the output does not match it'}"


def _log_unexpected(error: BaseException) -> None:
    log.error("a grammar failed: %s: %s", type(error).__name__, error)
