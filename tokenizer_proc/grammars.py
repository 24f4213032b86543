"""Grammars of requests: checked and translated by a child process before the scheduler hears of the request."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from pathlib import Path

from config.grammar import TokenTable, write_token_table
from ipc.messages import Grammar
from ipc.validation import InvalidRequest

from .grammar_requests import PLACE, Compile, Setup
from .killable_child import ChildBroken, ChildRefused, KillableChild, TookTooLong
from .vocabulary import Vocabulary

_MAX_CACHED = 1024  # grammars,
_MAX_CACHED_CHARS = 16 << 20  # and characters of them


def token_table(vocabulary: Vocabulary, vocab_size: int, eos_token_ids: tuple[int, ...]) -> TokenTable:
    """The vocabulary as grammars see it; `vocab_size` is the number of rows of the embedding."""
    return TokenTable(
        [vocabulary.token_bytes(token_id) for token_id in range(vocab_size)],
        sorted(token_id for token_id in vocabulary.special_ids if token_id < vocab_size),
        [token_id for token_id in eos_token_ids if token_id < vocab_size],
    )


class GrammarCompiler:
    """Keeps what was compiled, by source. Nothing is started or written before the first grammar."""

    def __init__(
        self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: tuple[int, ...], path: Path, timeout: float
    ) -> None:
        """`path`: where the worker will look for the token table. `timeout`: seconds that one grammar may take."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._path = path
        self._timeout = timeout
        self._child = KillableChild("tokenizer_proc.grammar_child", Setup(str(path), timeout), timeout)
        self._table: asyncio.Task[None] | None = None
        self._cache: OrderedDict[bytes, str] = OrderedDict()
        self._cached_chars = 0
        self.compiled = 0  # or refused, since the start
        self.seconds = 0.0  # that this took, waiting for others included

    @property
    def waited(self) -> float:
        """Seconds that grammars waited for those before them, since the start."""
        return self._child.waited

    def known(self, grammar: Grammar) -> str | None:
        """The compiled form, if it is at hand."""
        key = _key(grammar)
        compiled = self._cache.get(key)
        if compiled is not None:
            self._cache.move_to_end(key)
        return compiled

    async def compile(self, grammar: Grammar) -> str:
        """The form that the worker takes; `InvalidRequest` when it can't be compiled, or not in time."""
        if (compiled := self.known(grammar)) is not None:
            return compiled
        if self._table is None or (self._table.done() and self._table.exception() is not None):
            self._table = asyncio.create_task(asyncio.to_thread(self._write_table))
        await asyncio.shield(self._table)
        asked = time.perf_counter()
        try:
            compiled = await self._child.ask(Compile(grammar.kind, grammar.source))
        except ChildRefused as error:
            raise _invalid(grammar, str(error)) from None
        except TookTooLong:
            raise InvalidRequest(f"grammar: compiling it took longer than {self._timeout:g} s", "grammar") from None
        except ChildBroken:
            raise InvalidRequest(
                "grammar: it could not be compiled, or not with the memory there is", "grammar"
            ) from None
        finally:
            self.compiled += 1
            self.seconds += time.perf_counter() - asked
        self._keep(_key(grammar), compiled)
        return compiled

    def _write_table(self) -> None:
        write_token_table(self._path, token_table(self._vocabulary, self._vocab_size, self._eos_token_ids))

    def _keep(self, key: bytes, compiled: str) -> None:
        if key in self._cache:
            return
        self._cache[key] = compiled
        self._cached_chars += len(compiled)
        while len(self._cache) > _MAX_CACHED or self._cached_chars > _MAX_CACHED_CHARS:
            _, oldest = self._cache.popitem(last=False)
            self._cached_chars -= len(oldest)

    async def close(self) -> None:
        """End the child, whatever it is doing."""
        await self._child.close()


def _invalid(grammar: Grammar, problem: str) -> InvalidRequest:
    """The error about a grammar, or about the field of the request that the line in question was made from."""
    place = PLACE.match(problem)
    origin = grammar.origins.get(int(place[1])) if place is not None else None
    if place is None or origin is None:
        return InvalidRequest(f"grammar: {problem}", "grammar")
    return InvalidRequest(f"{origin}: {problem[place.end() :]}", origin)


def _key(grammar: Grammar) -> bytes:
    return hashlib.blake2b(f"{grammar.kind}\0{grammar.source}".encode(), digest_size=16).digest()
