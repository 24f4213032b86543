"""The grammars of rows: which token may come next, and when an output is all that its grammar allows.

A row's matcher is built when the row arrives, from the outputs that it has by then, so preemption and recovery need
nothing else. Building and masks run on a thread beside the forward; llguidance lets go of the interpreter meanwhile.
Whatever goes wrong with a matcher is that row's failure. The vocabulary is loaded for the first grammar.
"""

import logging
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from config.grammar import GRAMMAR_LIMITS, read_token_table
from gpu_workers.rows import Ints, int32_columns
from gpu_workers.sampling import IntArray, TokenMask
from ipc.messages import NewRow, RowFailure

log = logging.getLogger(__name__)

_MAX_PRISTINE = 128  # matchers in their first state, to copy for the next request with the same grammar
_MAX_THREADS = 8
_IMPOSSIBLE = (
    "grammar: no token is possible that both the grammar and the request's other parameters allow (allowed_token_ids, "
    "bad_words, logit_bias, min_tokens)"
)


@dataclass(slots=True, eq=False)
class _Row:
    """One row's matcher; None before it was built and after it has done its work."""

    matcher: LLMatcher | None = None
    problem: str = ""  # why the row can't go on


class _Engine:
    """llguidance with this model's vocabulary."""

    def __init__(self, token_table: Path) -> None:
        table = read_token_table(token_table)
        self._tokenizer = LLTokenizer(cast(TokenizerWrapper, table), eos_token=table.eos_token_ids or None)
        self._limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._executor = LLExecutor(min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2)))
        self._words = -(-self._tokenizer.vocab_size // 32)
        self._pristine: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> LLMatcher:
        """A new matcher, which may be in error."""
        pristine = self._pristine.get(grammar)
        if pristine is None:
            pristine = self._pristine[grammar] = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if len(self._pristine) > _MAX_PRISTINE:
                self._pristine.popitem(last=False)
        self._pristine.move_to_end(grammar)
        return pristine.deep_copy()

    def allowed(self, matchers: list[LLMatcher]) -> IntArray:
        """[R, V or a little more] uint8: 1 where a token may come next; of a matcher in error it means nothing."""
        bits = np.zeros((len(matchers), self._words), dtype="<i4")
        targets = [(matcher, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(targets, bits.ctypes.data, 4 * self._words, len(matchers))
        return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")


class Grammars:
    """The matchers of all rows that have a grammar, on the rank that samples."""

    def __init__(self, token_table: Path, vocab_size: int) -> None:
        """`token_table`: the file that is there as soon as a request with a grammar is."""
        self._token_table = token_table
        self._vocab_size = vocab_size
        self._engine: _Engine | None = None
        self._rows: dict[int, _Row] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # its jobs run in order
        self._masks: Future[TokenMask | None] | None = None

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

    def mask(self) -> TokenMask | None:
        """What may come next in the rows that `begin` was called with; None where all of them are free."""
        return None if self._masks is None else self._masks.result()

    def take(self, rows: Ints, token_ids: IntArray) -> tuple[tuple[int, ...], tuple[RowFailure, ...]]:
        """Advance by one sampled token per row, -1 where none was possible.

        The indices of rows whose output is now complete, and the failures. Until the scheduler knows of either, such a
        row runs in vain.
        """
        completed: list[int] = []
        failed: list[RowFailure] = []
        for index, (number, token_id) in enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True)):
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
                self._engine = _Engine(self._token_table)
            matcher = self._engine.matcher(grammar)
            if outputs:
                matcher.consume_tokens(outputs)
            if matcher.is_error():
                row.problem = _problem(matcher)
            else:
                row.matcher = matcher
        except Exception as error:
            row.problem = _unexpected(error)

    def _compute(self, found: list[tuple[int, _Row]]) -> TokenMask | None:
        live = [(index, row, row.matcher) for index, row in found if row.matcher is not None]
        if not live:
            return None
        assert self._engine is not None
        try:
            allowed = self._engine.allowed([matcher for _, _, matcher in live])[:, : self._vocab_size]
        except Exception as error:
            for _, row, _ in live:
                row.problem, row.matcher = _unexpected(error), None
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
        return TokenMask(indices, allowed[sound] == 0)


def _problem(matcher: LLMatcher) -> str:
    return f"grammar: {matcher.get_error().strip() or 'the output does not match it'}"


def _unexpected(error: Exception) -> str:
    log.error("a grammar failed: %s: %s", type(error).__name__, error)
    return "grammar: its matcher failed"
