"""What an answer says of the prompt: log-probabilities in vLLM's form and in OpenAI's older one, token ids."""

from msgspec import Struct

from ipc.codec import unpack_ints
from ipc.messages import PromptInfo, PromptPosition

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


class PromptLogprob(Struct):
    """One token at one place of a prompt."""

    logprob: float
    rank: int  # 1: the most likely token
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


def finite(logprob: float) -> float:
    """`logprob`, or what stands for it in JSON."""
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs(info: PromptInfo, top: int) -> PromptLogprobs:
    """vLLM's form: null for the first token, then by token id the prompt's own token and the `top` best."""
    return [None, *(_by_id(position, top) for position in info.positions)]


def _by_id(position: PromptPosition, top: int) -> dict[int, PromptLogprob]:
    chosen = position.chosen
    found = {chosen.token_id: PromptLogprob(finite(chosen.logprob), position.rank, chosen.token)}
    for rank, token in enumerate(position.top[:top], 1):
        found.setdefault(token.token_id, PromptLogprob(finite(token.logprob), rank, token.token))
    return found


class CompletionLogprobs(Struct):
    """The columns of OpenAI's older form."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first token of an echoed prompt, as in the next
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def echoed_logprobs(info: PromptInfo, top: int) -> CompletionLogprobs:
    """Those of `info`, with the `top` best tokens at each place."""
    return CompletionLogprobs(
        [info.first_token, *(position.chosen.token for position in info.positions)],
        [None, *(finite(position.chosen.logprob) for position in info.positions)],
        [None, *(_by_text(position, top) for position in info.positions)],
        list(unpack_ints(info.offsets)),
    )


def _by_text(position: PromptPosition, top: int) -> dict[str, float]:
    tokens = (*position.top[:top], position.chosen)
    return {token.token: finite(token.logprob) for token in tokens}
