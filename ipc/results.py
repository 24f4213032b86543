"""What the client SDK hands out: messages of the engine, put together and easier to read."""

from collections.abc import Sequence

from msgspec import Struct

from .codec import unpack_floats, unpack_ints
from .messages import Delta, Finished, FinishReason, PositionLogprobs, PromptInfo, PromptPosition, Timings


class Usage(Struct, frozen=True):
    """Counts of tokens. The prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, whose KV was still there

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Choice(Struct, frozen=True):
    """One of the `n` answers to a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    logprobs: tuple[PositionLogprobs, ...] = ()  # of each token, when asked for
    timings: Timings | None = None
    cached_tokens: int = 0  # of the prompt, as this choice found it


class Completion(Struct, frozen=True):
    """The whole answer to a request; `text`, `token_ids` and `finish_reason` are those of the first choice."""

    choices: tuple[Choice, ...]  # in order of index
    usage: Usage
    attempts: int = 1  # how often the request was sent until it was answered
    prompt: "Score | None" = None  # when asked for (`return_prompt`, `prompt_logprobs`)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


class Chunk(Struct, frozen=True):
    """A piece of one choice; its last one has the reason for its end."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Embedding(Struct, frozen=True):
    """A text as a vector of float32, of length 1."""

    vector: Sequence[float]
    usage: Usage
    attempts: int = 1


class Tokens(Struct, frozen=True):
    """Token ids of a prompt and, when asked for, how the vocabulary spells them."""

    token_ids: tuple[int, ...]
    token_strs: tuple[str, ...] = ()


class Score(Struct, frozen=True):
    """What the model makes of a prompt."""

    token_ids: tuple[int, ...]
    text: str
    positions: tuple[PromptPosition, ...] = ()  # of all tokens but the first

    @property
    def logprob(self) -> float:
        """Natural logarithm of the probability of the tokens after the first, given those before each."""
        return sum(position.chosen.logprob for position in self.positions)


def score_of(info: PromptInfo) -> Score:
    return Score(tuple(unpack_ints(info.token_ids)), info.text, info.positions)


def embedding_of(end: Finished, attempts: int) -> Embedding:
    return Embedding(unpack_floats(end.embedding), Usage(end.prompt_tokens, 0, end.cached_tokens), attempts)


def chunk_of(item: Delta | Finished) -> Chunk | None:
    """None for a delta whose text is still pending."""
    if isinstance(item, Finished):
        return Chunk(item.index, finish_reason=item.reason, stop_reason=item.stop_reason)
    if not item.text and not item.token_ids:
        return None
    return Chunk(item.index, item.text, tuple(unpack_ints(item.token_ids)), item.logprobs)


class _Parts:
    """What has come of one choice."""

    __slots__ = ("end", "logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[bytes] = []
        self.logprobs: list[PositionLogprobs] = []
        self.end: Finished | None = None


class Collector:
    """Puts an answer together from what arrives of it."""

    def __init__(self) -> None:
        self._choices: dict[int, _Parts] = {}

    def add(self, items: Sequence[Delta | Finished]) -> None:
        for item in items:
            parts = self._choices.get(item.index)
            if parts is None:
                parts = self._choices[item.index] = _Parts()
            if isinstance(item, Finished):
                parts.end = item
                continue
            parts.texts.append(item.text)
            parts.token_ids.append(item.token_ids)
            if item.logprobs:
                parts.logprobs += item.logprobs

    def completion(self, choices: int, attempts: int, prompt: PromptInfo | None) -> Completion | None:
        """The answer of so many choices; None while something of it is missing."""
        ends = [parts.end for _, parts in sorted(self._choices.items()) if parts.end is not None]
        if len(ends) != choices:
            return None
        usage = Usage(
            ends[0].prompt_tokens,
            sum(end.completion_tokens for end in ends),
            min(end.cached_tokens for end in ends),
        )
        return Completion(
            tuple(self._choice(end) for end in ends), usage, attempts, None if prompt is None else score_of(prompt)
        )

    def _choice(self, end: Finished) -> Choice:
        parts = self._choices[end.index]
        return Choice(
            end.index,
            "".join(parts.texts),
            tuple(unpack_ints(b"".join(parts.token_ids))),
            end.reason,
            end.stop_reason,
            tuple(parts.logprobs),
            end.timings,
            end.cached_tokens,
        )
