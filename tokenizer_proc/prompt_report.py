"""What a request is told of its own prompt: ids, text, where each token begins, and log-probabilities."""

from collections.abc import Sequence

from ipc.codec import pack_ints, unpack_floats, unpack_ints
from ipc.engine_messages import PromptScores
from ipc.messages import Generate, PromptInfo, PromptPosition, TextPrompt, TokenLogprob

from .vocabulary import Vocabulary


def name_token(vocabulary: Vocabulary, token_id: int, logprob: float) -> TokenLogprob:
    """A log-probability with the token's text and bytes."""
    spelled = vocabulary.token_bytes(token_id)
    return TokenLogprob(token_id, spelled.decode("utf-8", "replace"), spelled, logprob)


class PromptReport:
    """Collects until it is `complete`; then `info` is for the client, before anything of the choices."""

    def __init__(self, message: Generate, token_ids: Sequence[int], vocabulary: Vocabulary) -> None:
        """`token_ids`: the encoded prompt of `message`."""
        self._message = message
        self._token_ids = token_ids
        self._vocabulary = vocabulary
        self._missing = 0 if message.params.prompt_logprobs is None else len(token_ids) - 1
        self._positions: list[PromptPosition] = []

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def take(self, scores: PromptScores) -> None:
        """Add log-probabilities of the next tokens; ValueError when the columns do not fit."""
        chosen, ranks = unpack_floats(scores.chosen), unpack_ints(scores.ranks)
        ids, values = unpack_ints(scores.top_ids), unpack_floats(scores.top_values)
        count, first = len(chosen), len(self._positions) + 1
        k = len(ids) // count if count else 0
        if len(ranks) != count or len(ids) != len(values) or len(ids) != k * count or not 1 <= count <= self._missing:
            raise ValueError(f"{count} prompt log-probabilities, {len(ranks)} ranks, {len(ids)} alternatives")
        if scores.first != first:
            raise ValueError(f"prompt log-probabilities from token {scores.first}, due is {first}")
        name, vocabulary = name_token, self._vocabulary
        for at in range(count):
            best = range(at * k, (at + 1) * k)
            self._positions.append(
                PromptPosition(
                    name(vocabulary, self._token_ids[first + at], chosen[at]),
                    ranks[at],
                    tuple(name(vocabulary, ids[other], values[other]) for other in best),
                )
            )
        self._missing -= count

    def info(self) -> PromptInfo:
        """All of it."""
        prompt, params = self._message.prompt, self._message.params
        if isinstance(prompt, TextPrompt):
            text = prompt.text
        else:
            text = self._vocabulary.decode(self._token_ids, skip_special_tokens=params.skip_special_tokens)
        offsets = b"" if params.prompt_logprobs is None else self._offsets(text)
        first = name_token(self._vocabulary, self._token_ids[0], 0.0).token
        token_ids = pack_ints(self._token_ids)
        return PromptInfo(self._message.request_id, token_ids, text, offsets, first, tuple(self._positions))

    def _offsets(self, text: str) -> bytes:
        """Where in `text` each token begins, or the character that it is a part of."""
        skip = self._message.params.skip_special_tokens
        detokenizer = self._vocabulary.detokenizer((), skip_special_tokens=skip)
        starts, pieces, length = [], [], 0
        for token_id in self._token_ids:
            starts.append(length)
            piece = detokenizer.push(token_id)
            pieces.append(piece)
            length += len(piece)
        decoded = "".join((*pieces, detokenizer.flush()))
        # Some vocabularies put a space before a text, which is not the client's.
        ahead = len(decoded) - len(text) if decoded.endswith(text) else 0
        return pack_ints(min(max(0, start - ahead), len(text)) for start in starts)
