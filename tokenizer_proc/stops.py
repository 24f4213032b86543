"""Stop strings in a text that arrives in pieces.

The match that ends first in the text wins; of several that end there, the longest. So the answer depends on the text
alone, not on how it was cut into tokens or chunks.
"""

from collections.abc import Sequence


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix.

    This is the failure function of Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977.
    """
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders


class StopMatcher:
    """Passes text through until a stop string is complete.

    Text that is a prefix of a stop string is held back until it is certain that the stop string does not follow, and no
    longer. With `include`, the stop string itself is part of the output, so nothing needs to be held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Empty stop strings are ignored: they would match before anything was said."""
        self._stops = tuple(stop for stop in stops if stop)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched_chars = [0] * len(self._stops)  # of each stop string, at the end of the text so far
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._underway = False  # whether any of `_matched_chars` is above 0
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be shown now. Once `matched` is set it is the last text there is."""
        if self.matched is not None:
            return ""
        if not self._underway and self._first_chars.isdisjoint(text):
            return text  # nearly always: no stop string goes on or begins in it
        text = self._held + text
        for position in range(len(self._held), len(text)):
            stop = self._step(text[position])
            if stop is not None:
                self.matched = stop
                self._held = ""
                end = position + 1
                return text[: end if self._include else end - len(stop)]
        longest = max(self._matched_chars)
        self._underway = longest > 0
        keep = 0 if self._include else longest
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def _step(self, char: str) -> str | None:
        """Advance every stop string's automaton by one character; the longest one that is complete."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            borders = self._borders[index]
            length = self._matched_chars[index]
            while length and stop[length] != char:
                length = borders[length - 1]
            if stop[length] == char:
                length += 1
            self._matched_chars[index] = length
            if length == len(stop) and (complete is None or length > len(complete)):
                complete = stop
        return complete

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held
