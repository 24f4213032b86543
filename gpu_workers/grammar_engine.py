"""llguidance with this model's vocabulary."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from config.grammar import GRAMMAR_LIMITS, read_token_table

_MAX_PRISTINE = 128  # matchers in their first state, to copy for the next request with the same grammar
_MAX_THREADS = 8


class GrammarEngine:
    """Makes matchers, and computes the masks of several at once."""

    def __init__(self, token_table: Path) -> None:
        """OSError or msgspec.DecodeError when the table can't be read."""
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

    def bits(self, matchers: list[LLMatcher]) -> NDArray[np.int32]:
        """[R, words of 32]: bit i of word j is set where token 32 j + i may come next.

        Of a matcher that is in error afterwards they mean nothing.
        """
        bits = np.zeros((len(matchers), self._words), dtype=np.int32)
        targets = [(matcher, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(targets, bits.ctypes.data, 4 * self._words, len(matchers))
        return bits
