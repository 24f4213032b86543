"""A line on stderr that says how far a drill is."""

import sys
import time


class Progress:
    """Shown on a terminal only; `step` after each of `total` parts."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._done = 0
        self._start = time.monotonic()

    def __enter__(self) -> "Progress":
        self._show()
        return self

    def step(self) -> None:
        self._done += 1
        self._show()

    def _show(self) -> None:
        if sys.stderr.isatty():
            seconds = time.monotonic() - self._start
            sys.stderr.write(f"\r  {self._name}: {self._done} of {self._total}, {seconds:.0f} s\x1b[K")
            sys.stderr.flush()

    def __exit__(self, *exception: object) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
