"""One choice being generated: token ids from the scheduler in, text for the client out.

How a choice ends:
- A stop string: the output ends with the token that completes it. `completion_tokens` counts the tokens up to and
  including that one; what the model generated beyond it is dropped, and a finish reason that comes with or after it is
  overridden by "stop". Text of the first `min_tokens` tokens is not searched.
- A stop token (end of sequence, or one of the request's `stop_token_ids`): it counts as a completion token, but has no
  text and no log-probabilities in the output, except with `include_stop_str_in_output`, which shows a token that the
  request itself named. A stop token in the very last place allowed ends the choice with "stop", not "length".
- A loop: the scheduler found that the output repeats itself. All of its text is shown, and `stop_reason` is
  `LOOP_STOP_REASON`.
- The length limit. With `max_tokens` 0 nothing is generated: what the engine samples all the same is dropped.

A `Delta` is made only when there is new text, or at the end. It carries the ids of the tokens whose text is out; those
of tokens whose text is still held back (an incomplete character, a possible stop string) wait with it, as do their
log-probabilities, which would otherwise give the held text away.

The scheduler tells its part of the timings with the end of the choice. It does not know of stop strings, so a request
that has some gets them with its first token too (and again behind each preemption); where one ends the choice, the
steps since are its tokens, and the last token's time is when it was taken in here.
"""

import struct
import time
from collections import deque
from collections.abc import Sequence

from msgspec import Struct, structs

from ipc.codec import pack_ints, unpack_floats, unpack_ints
from ipc.engine_messages import RawLogprobs, RowOutput
from ipc.messages import ChoiceTimings, Delta, Finished, FinishReason, PositionLogprobs, SamplingParams, Timings

from .prompt_report import name_token
from .stops import StopMatcher
from .vocabulary import Vocabulary

_pack_id = struct.Struct("<i").pack  # the same bytes as `pack_ints`
LOOP_STOP_REASON = "repetition_loop"  # a request that has this very text as a stop string cannot tell the two apart


class _Pending(Struct):
    """A token whose text is not all out yet. Offsets are characters from the start of the output, before any cut."""

    token_id: int
    start: int
    end: int
    logprobs: PositionLogprobs | None


class Progress(Struct):
    """What one row of a step means for a choice."""

    delta: Delta | None = None
    finished: Finished | None = None
    stops_early: bool = False  # at a stop string, of which the scheduler must be told


class Preparation(Struct, frozen=True):
    """What a request's choices have in common of their `Timings`."""

    clock_offset: float
    received: float
    tokenized: float


class Choice:
    """State of one choice; `take` is called for each of its rows, in order, until it returns `finished`."""

    def __init__(
        self,
        request_id: int,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        vocabulary: Vocabulary,
        preparation: Preparation,
        *,
        in_reasoning: bool = False,
    ) -> None:
        """`request_id` is the client's; `prompt` the encoded prompt; `params` validated.

        `in_reasoning`: whether the prompt has opened the reasoning with which the output begins; deltas say so.
        """
        self._preparation = preparation
        self._request_id = request_id
        self._index = index
        self._prompt_tokens = len(prompt)
        self._params = params
        self._vocabulary = vocabulary
        self._in_reasoning = in_reasoning
        self._detokenizer = vocabulary.detokenizer(
            prompt, skip_special_tokens=params.skip_special_tokens, shown=params.shown_special_tokens
        )
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._pending: deque[_Pending] = deque()
        self._num_tokens = 0
        self._num_chars = 0  # decoded
        self._num_shown = 0  # of which released to the client
        self._cached_tokens = 0
        self._scheduler_timings: ChoiceTimings | None = None  # the last that it told
        self._tokens_told = 0  # those that had come before it did

    def take_plain(self, token_id: int) -> Progress:
        """Add one token that came with nothing else to say, as nearly all do: no detours here."""
        start = self._num_chars
        shown = self._push(token_id)
        if shown and self._num_shown == self._num_chars and not self._pending and self._matcher.matched is None:
            return Progress(self._to_delta(shown, _pack_id(token_id), ()))
        self._pending.append(_Pending(token_id, start, self._num_chars, None))
        if self._matcher.matched is not None:
            return self._end("stop", self._matcher.matched, [shown], stops_early=True)
        return Progress(self._delta(shown))

    def take(self, row: RowOutput) -> Progress:
        """Add the tokens of `row`; ValueError when its columns do not fit together."""
        token_ids = unpack_ints(row.token_ids)
        if row.logprobs and len(row.logprobs) != len(token_ids):
            raise ValueError(f"{len(row.logprobs)} log-probabilities for {len(token_ids)} tokens")
        self._cached_tokens = max(self._cached_tokens, row.cached_tokens)
        if row.timings is not None:
            self._scheduler_timings, self._tokens_told = row.timings, self._num_tokens
        if self._params.max_tokens == 0:
            return Progress() if row.finish is None else self._end("length", None, [])
        if row.embedding and row.finish is not None:
            return Progress(finished=self._finished(row.finish, None, row.embedding))
        shown: list[str] = []
        for position, token_id in enumerate(token_ids):
            raw = row.logprobs[position] if row.logprobs else None
            if row.finish == "stop" and token_id == row.stop_token and position == len(token_ids) - 1:
                shown.append(self._add_stop_token(token_id, raw))
            else:
                shown.append(self._add(token_id, raw))
            if self._matcher.matched is not None:
                return self._end("stop", self._matcher.matched, shown, stops_early=row.finish is None)
        if row.finish is None:
            return Progress(delta=self._delta("".join(shown)))
        shown.append(self._show(self._detokenizer.flush(), searched=self._num_tokens > self._params.min_tokens))
        if self._matcher.matched is not None:
            return self._end("stop", self._matcher.matched, shown)
        held = self._matcher.flush()
        self._num_shown += len(held)
        shown.append(held)
        if row.loop:
            return self._end("stop", LOOP_STOP_REASON, shown)
        named = row.finish == "stop" and row.stop_token in self._params.stop_token_ids
        return self._end(row.finish, row.stop_token if named else None, shown)

    def _add(self, token_id: int, raw: RawLogprobs | None) -> str:
        start = self._num_chars
        shown = self._push(token_id)
        logprobs = None if raw is None else self._name(token_id, raw, start)
        self._pending.append(_Pending(token_id, start, self._num_chars, logprobs))
        return shown

    def _push(self, token_id: int) -> str:
        """Count and decode one token; the text that it lets out."""
        self._num_tokens += 1
        text = self._detokenizer.push(token_id)
        return self._show(text, searched=self._num_tokens > self._params.min_tokens)

    def _add_stop_token(self, token_id: int, raw: RawLogprobs | None) -> str:
        if self._params.include_stop_str_in_output and token_id in self._params.stop_token_ids:
            return self._add(token_id, raw)
        self._num_tokens += 1
        self._pending.append(_Pending(token_id, self._num_chars, self._num_chars, None))
        return ""

    def _show(self, text: str, *, searched: bool) -> str:
        self._num_chars += len(text)
        shown = self._matcher.push(text) if searched else text
        self._num_shown += len(shown)
        return shown

    def _delta(self, text: str) -> Delta | None:
        """New text with the tokens that are all out, or None when there is no new text."""
        if not text:
            return None
        token_ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        while self._pending and self._pending[0].end <= self._num_shown:
            token = self._pending.popleft()
            token_ids.append(token.token_id)
            if token.logprobs is not None:
                logprobs.append(token.logprobs)
        return self._to_delta(text, pack_ints(token_ids), tuple(logprobs))

    def _to_delta(self, text: str, token_ids: bytes, logprobs: tuple[PositionLogprobs, ...]) -> Delta:
        return Delta(self._request_id, self._index, text, token_ids, logprobs, self._in_reasoning, self._prompt_tokens)

    def _end(
        self, reason: FinishReason, stop_reason: str | int | None, shown: list[str], *, stops_early: bool = False
    ) -> Progress:
        delta = None
        text = "".join(shown)
        if text or self._pending:
            # Of a stop string's own tokens the ids are listed, since they count, but no text, so no log-probabilities.
            logprobs = [
                token.logprobs
                for token in self._pending
                if token.logprobs is not None and (token.start < self._num_shown or token.end <= self._num_shown)
            ]
            ids = pack_ints(token.token_id for token in self._pending)
            delta = self._to_delta(text, ids, tuple(logprobs))
            self._pending.clear()
        return Progress(delta, self._finished(reason, stop_reason), stops_early)

    def _finished(self, reason: FinishReason, stop_reason: str | int | None, embedding: bytes = b"") -> Finished:
        return Finished(
            self._request_id,
            self._index,
            reason,
            stop_reason,
            self._prompt_tokens,
            self._num_tokens,
            self._cached_tokens,
            embedding,
            self._timings(),
        )

    def _timings(self) -> Timings | None:
        now, told = time.monotonic(), self._scheduler_timings
        if told is None:
            return None
        if not told.last_token:
            steps = told.steps + self._num_tokens - self._tokens_told - 1
            told = structs.replace(told, last_token=now, steps=steps)
        preparation = self._preparation
        return Timings(preparation.clock_offset, preparation.received, preparation.tokenized, now, told)

    def _name(self, token_id: int, raw: RawLogprobs, start: int) -> PositionLogprobs:
        ids, values = unpack_ints(raw.top_ids), unpack_floats(raw.top_values)
        if len(ids) != len(values):
            raise ValueError(f"{len(ids)} alternatives with {len(values)} log-probabilities")
        top = tuple(name_token(self._vocabulary, other, value) for other, value in zip(ids, values, strict=True))
        return PositionLogprobs(name_token(self._vocabulary, token_id, raw.chosen), top, start)
