"""What the sampler remembers of each row between steps: the request's settings, and the tokens its penalties count."""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_workers.rows import Ints, PlanError, check_range, int32_columns
from gpu_workers.sampling import GREEDY_BELOW, Bias, LogitEdit, Penalties, SamplingBatch
from ipc.engine_messages import NewRow, SamplingSpec

_NO_IDS = np.empty(0, dtype=np.int64)


class SeenTokens:
    """The distinct tokens of one request, with the number of times each occurs in its output."""

    __slots__ = ("_counts", "_ids", "_position")

    def __init__(self, token_ids: Ints, num_prompt: int) -> None:
        distinct, position = np.unique(token_ids, return_inverse=True)
        size = len(distinct)
        self._ids = np.empty(size + 64, dtype=np.int64)
        self._ids[:size] = distinct
        self._counts = np.zeros(size + 64, dtype=np.float32)
        self._counts[:size] = np.bincount(position[num_prompt:], minlength=size)
        self._position = {token_id: i for i, token_id in enumerate(distinct.tolist())}

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        position = self._position.get(token_id)
        if position is None:
            position = self._position[token_id] = len(self._position)
            if position == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[position] = token_id
        self._counts[position] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._position)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._position)]


class BadWords:
    """The bad words of one request, and the end of its output."""

    __slots__ = ("_output", "_single", "_words")

    def __init__(self, words: list[list[int]], outputs: list[int]) -> None:
        """`words`: token ids of each, none empty; `outputs`: so far."""
        self._single = [word[0] for word in words if len(word) == 1]
        self._words = [word for word in words if len(word) > 1]
        self._output = deque(outputs, maxlen=max((len(word) - 1 for word in self._words), default=0))

    def add(self, token_id: int) -> None:
        self._output.append(token_id)

    def banned(self) -> list[int]:
        """The ids that would complete a word now."""
        tail = list(self._output)
        return self._single + [word[-1] for word in self._words if tail[-len(word) + 1 :] == word[:-1]]


class SamplerState:
    """The sampling settings of `max_seqs` rows as columns; what few requests use lies in dictionaries by row."""

    def __init__(self, max_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_seqs, dtype=np.int64)
        self._top_p = np.ones(max_seqs, dtype=np.float64)
        self._min_p = np.zeros(max_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_seqs, dtype=np.uint64)
        self._logprobs = np.full(max_seqs, -1, dtype=np.int64)
        self._min_tokens = np.zeros(max_seqs, dtype=np.int64)
        self._penalties = np.zeros((max_seqs, 3), dtype=np.float32)  # repetition, presence, frequency
        self._plain = np.zeros(max_seqs, dtype=np.bool_)  # greedy and nothing else: one argmax does
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._banned: dict[int, NDArray[np.int64]] = {}
        self._allowed: dict[int, NDArray[np.int64]] = {}
        self._bad_words: dict[int, BadWords] = {}
        self._seen: dict[int, SeenTokens] = {}
        self._kept: tuple[dict[int, Any], ...] = (
            self._bias,
            self._banned,
            self._allowed,
            self._bad_words,
            self._seen,
        )

    def add(self, new: NewRow) -> None:
        """Take over a new row's settings; raises `PlanError` for ids outside the vocabulary."""
        row, spec = new.row, new.sampling
        self.free([row])
        if not 0 <= spec.seed < 1 << 64:
            raise PlanError(f"new_rows: row {row}: seed {spec.seed} does not fit in 64 unsigned bits")
        if not -1 <= spec.logprobs <= self._vocab_size:
            raise PlanError(f"new_rows: row {row}: logprobs {spec.logprobs} is outside -1..{self._vocab_size}")
        self._temperature[row] = spec.temperature
        self._top_k[row] = spec.top_k
        self._top_p[row] = spec.top_p
        self._min_p[row] = spec.min_p
        self._seeds[row] = spec.seed
        self._logprobs[row] = spec.logprobs
        self._min_tokens[row] = spec.min_tokens
        self._penalties[row] = spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty
        if spec.bias_ids:
            self._bias[row] = self._bias_of(row, spec)
        if spec.banned_ids and spec.min_tokens > 0:
            self._banned[row] = self._ids(row, spec.banned_ids, "banned id")
        if spec.allowed_ids:
            self._allowed[row] = self._ids(row, spec.allowed_ids, "allowed id")
        if spec.bad_words:
            words = [int32_columns(word, 1, "bad_words")[:, 0].tolist() for word in spec.bad_words]
            if not all(words):
                raise PlanError(f"new_rows: row {row}: a bad word without tokens")
            self._ids(row, b"".join(spec.bad_words), "id of a bad word")
            outputs = int32_columns(new.token_ids, 1, "token_ids")[new.num_prompt :, 0].tolist()
            self._bad_words[row] = BadWords(words, outputs)
        if spec.repetition_penalty != 1 or spec.presence_penalty != 0 or spec.frequency_penalty != 0:
            self._seen[row] = SeenTokens(int32_columns(new.token_ids, 1, "token_ids")[:, 0], new.num_prompt)
        self._plain[row] = (
            spec.temperature < GREEDY_BELOW
            and spec.logprobs < 0
            and not spec.grammar
            and not any(row in kept for kept in self._kept)
        )

    def _ids(self, row: int, data: bytes, name: str) -> NDArray[np.int64]:
        ids = int32_columns(data, 1, name)[:, 0]
        check_range(ids, self._vocab_size, f"new_rows: row {row}: {name}")
        return np.unique(ids).astype(np.int64)

    def _bias_of(self, row: int, spec: SamplingSpec) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        ids = self._ids(row, spec.bias_ids, "bias id")
        if len(spec.bias_values) != 4 * len(ids):
            raise PlanError(f"new_rows: row {row}: bias ids are not distinct, or not as many as the values")
        order = np.argsort(np.frombuffer(spec.bias_ids, dtype="<i4"))
        return ids, np.frombuffer(spec.bias_values, dtype="<f4")[order]

    def free(self, rows: list[int]) -> None:
        """Forget what is kept for these rows besides the columns."""
        for row in rows:
            for kept in self._kept:
                kept.pop(row, None)

    def record(self, rows: Ints, token_ids: NDArray[np.int64]) -> None:
        """Take note of newly sampled tokens where penalties or bad words look at them."""
        if self._seen or self._bad_words:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                for kept in (self._seen.get(row), self._bad_words.get(row)):
                    if kept is not None:
                        kept.add(token_id)

    def needs_last_tokens(self, rows: Ints) -> bool:
        """Whether penalties or bad words of these rows look at the tokens that `record` was told last."""
        return bool(self._seen or self._bad_words) and any(
            row in self._seen or row in self._bad_words for row in rows.tolist()
        )

    def all_plain(self, rows: Ints) -> bool:
        """True when these rows are greedy and ask for nothing else."""
        return bool(self._plain[rows].all())

    def batch(self, rows: Ints, output_index: NDArray[np.int64]) -> SamplingBatch:
        """The settings of the sampling rows of one step; `output_index` [S] counts each row's outputs so far."""
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            output_index=output_index,
            logprobs=self._logprobs[rows],
            bias=self._bias_batch(rows),
            banned=self._banned_batch(rows, output_index),
            allowed=self._allowed_batch(rows),
            penalties=self._penalty_batch(rows),
        )

    def _bias_batch(self, rows: Ints) -> Bias | None:
        found = [(i, self._bias[row]) for i, row in enumerate(rows.tolist()) if row in self._bias]
        if not found:
            return None
        return Bias(
            rows=np.repeat([i for i, _ in found], [len(ids) for _, (ids, _) in found]),
            ids=np.concatenate([ids for _, (ids, _) in found]),
            values=np.concatenate([values for _, (_, values) in found]),
        )

    def _allowed_batch(self, rows: Ints) -> dict[int, NDArray[np.int64]] | None:
        if not self._allowed:
            return None
        return {i: self._allowed[row] for i, row in enumerate(rows.tolist()) if row in self._allowed}

    def _banned_batch(self, rows: Ints, output_index: NDArray[np.int64]) -> LogitEdit | None:
        if not self._banned and not self._bad_words:
            return None
        early = (output_index < self._min_tokens[rows]).tolist()
        found = [
            (i, ids)
            for i, (row, is_early) in enumerate(zip(rows.tolist(), early, strict=True))
            if len(ids := self._banned_ids(row, is_early))
        ]
        if not found:
            return None
        return LogitEdit(
            rows=np.repeat([i for i, _ in found], [len(ids) for _, ids in found]),
            ids=np.concatenate([ids for _, ids in found]),
        )

    def _banned_ids(self, row: int, is_early: bool) -> NDArray[np.int64]:
        """What a row may not sample now; nothing where that would leave it nothing at all."""
        ids = self._banned.get(row, _NO_IDS) if is_early else _NO_IDS
        if row in self._bad_words:
            ids = np.union1d(ids, np.array(self._bad_words[row].banned(), dtype=np.int64))
        allowed = self._allowed.get(row)
        if len(ids) == self._vocab_size or (allowed is not None and np.isin(allowed, ids).all()):
            return _NO_IDS
        return ids

    def _penalty_batch(self, rows: Ints) -> Penalties | None:
        found = [(i, row) for i, row in enumerate(rows.tolist()) if row in self._seen]
        if not found:
            return None
        seen = [self._seen[row] for _, row in found]
        sizes = [len(one.ids) for one in seen]
        settings = np.repeat(self._penalties[[row for _, row in found]], sizes, axis=0)
        return Penalties(
            rows=np.repeat([i for i, _ in found], sizes),
            ids=np.concatenate([one.ids for one in seen]),
            counts=np.concatenate([one.counts for one in seen]),
            repetition=settings[:, 0],
            presence=settings[:, 1],
            frequency=settings[:, 2],
        )
