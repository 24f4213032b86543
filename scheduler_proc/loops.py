"""Finds an output that repeats itself: small models under greedy decoding fall into loops and never end."""

from array import array

MAX_PERIOD = 64  # tokens; a longer text that returns may be a refrain, a table or code
MIN_COVERED = 32  # tokens; "......" and "ha ha ha" are not yet loops


class LoopDetector:
    """Watches the end of one request's output.

    Looks at a period only when it could have become a loop. A look goes back from the end to the latest token that
    differs from the one a period before it, and until enough tokens have come after that one, that period need not be
    looked at again: about two short looks a token with 2 repeats, fewer with more.
    """

    __slots__ = ("_looks", "_matches_from", "_repeats", "_seen", "_tokens")

    def __init__(self, repeats: int) -> None:
        """`repeats`: how often in a row the sequence must stand at the end; at least 2 (1 would be no repetition)."""
        if repeats < 2:
            raise ValueError(f"repeats is {repeats}; it must be at least 2")
        self._repeats = repeats
        self._tokens = array("i")
        self._looks: dict[int, list[int]] = {}  # number of tokens -> periods to look at then
        # By period: tokens seen at its last look, and the index from which all of those equal the ones a period before.
        self._seen = list(range(MAX_PERIOD + 1))
        self._matches_from = list(range(MAX_PERIOD + 1))
        for period in range(1, MAX_PERIOD + 1):
            self._looks.setdefault(self._covered(period), []).append(period)

    def take(self, token: int) -> bool:
        """Whether with this token the output ends in a loop.

        True when its last max(p * repeats, MIN_COVERED) tokens have some period p from 1 to MAX_PERIOD.
        """
        self._tokens.append(token)
        periods = self._looks.pop(len(self._tokens), None)
        return periods is not None and self._look(periods)

    def _look(self, periods: list[int]) -> bool:
        tokens, length, found = self._tokens, len(self._tokens), False
        for period in periods:
            start, seen = length, self._seen[period]
            while start > seen and tokens[start - 1] == tokens[start - 1 - period]:
                start -= 1
            if start > seen:
                self._matches_from[period] = start
            self._seen[period] = length
            complete = self._matches_from[period] + self._covered(period) - period  # length with which it is a loop
            found = found or complete <= length
            self._looks.setdefault(max(complete, length + 1), []).append(period)
        return found

    def _covered(self, period: int) -> int:
        return max(period * self._repeats, MIN_COVERED)
