"""The columns of `ChoiceTimings` as rows."""

from array import array

from .messages import ChoiceTimings


def chunks_of(timings: ChoiceTimings) -> list[tuple[float, float, int]]:
    """When each step with tokens of the prompt was planned, when its result came, and how many tokens it computed.

    ValueError when the columns do not fit together.
    """
    starts, ends, tokens = array("d"), array("d"), array("i")
    starts.frombytes(timings.chunk_starts)
    ends.frombytes(timings.chunk_ends)
    tokens.frombytes(timings.chunk_tokens)
    return list(zip(starts, ends, tokens, strict=True))
