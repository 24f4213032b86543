"""How far a batch is, for whoever watches it."""

import sys
import time


class Progress:
    """One line on stderr: rewritten in place on a terminal, now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._started = self._shown = time.monotonic()
        self._done = self._failed = self._tokens = 0
        self._live = sys.stderr.isatty()

    def add(self, failed: bool, tokens: int) -> None:
        self._done += 1
        self._failed += failed
        self._tokens += tokens
        if time.monotonic() - self._shown >= (0.2 if self._live else 5.0):
            self.show("\r" if self._live else "\n")

    def show(self, end: str = "\n") -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._started
        rest = seconds / self._done * (self._total - self._done) if self._done else 0.0
        print(
            f"{self._done}/{self._total} answered, {self._failed} with an error, "
            f"{self._tokens / max(seconds, 1e-9):.0f} output tokens/s, {seconds:.0f} s, {rest:.0f} s to go   ",
            end=end,
            file=sys.stderr,
            flush=True,
        )
