"""When what happened to one request, as far as nothing else keeps it; told to clients as `ChoiceTimings`.

Written once for each chunk of a prompt and never for a token that is decoded: whoever ends a request knows the time of
its last token, and its outputs tell how many steps decoded.
"""

from array import array

from ipc.messages import ChoiceTimings

MAX_CHUNKS = 64


class Timeline:
    """Times are seconds on the clock of the core's events; 0.0: it has not come to that."""

    __slots__ = ("_chunk_ends", "_chunk_starts", "_chunk_tokens", "_silent_steps", "first_scheduled", "first_token")

    def __init__(self) -> None:
        self.first_scheduled = 0.0
        self.first_token = 0.0
        self._silent_steps = 0  # that computed tokens of it and gave it none
        self._chunk_starts = array("d")
        self._chunk_ends = array("d")
        self._chunk_tokens = array("i")

    def add_chunk(self, planned: float, ended: float, tokens: int, *, sampled: bool) -> None:
        """A step that computed `tokens` tokens of its prompt, or again of what it had, has come back.

        `sampled`: with a token that counts.
        """
        if not sampled:
            self._silent_steps += 1
        elif not self.first_token:
            self.first_token = ended
        if len(self._chunk_tokens) < MAX_CHUNKS:
            self._chunk_starts.append(planned)
            self._chunk_ends.append(ended)
            self._chunk_tokens.append(tokens)
        else:
            self._chunk_ends[-1] = ended
            self._chunk_tokens[-1] += tokens

    def tell(self, *, queued: float, last_token: float, outputs: int, preemptions: int) -> ChoiceTimings:
        """All of it. `outputs`: tokens that the request has got."""
        return ChoiceTimings(
            queued,
            self.first_scheduled,
            self.first_token,
            last_token,
            outputs + self._silent_steps,
            preemptions,
            self._chunk_starts.tobytes(),
            self._chunk_ends.tobytes(),
            self._chunk_tokens.tobytes(),
        )
