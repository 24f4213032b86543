"""What the launcher shows on stderr: how far the processes have come, and what happens to them."""

import sys
import time
from typing import TextIO

_LIVE_WIDTH = 90  # a longer line would wrap, and what wraps cannot be written over


class StartDisplay:
    """Stages with their times: one live line on a terminal, one line per stage elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._began = time.monotonic()
        self._stages: dict[str, str] = {}

    def stage(self, process: str, stage: str, fraction: float | None = None) -> None:
        """`process` has come to `stage`, or further within it."""
        is_news = self._stages.get(process) != stage
        self._stages[process] = stage
        if self._live:
            shown = stage if fraction is None else f"{stage} {fraction:.0%}"
            others = [f"{name}: {at}" for name, at in self._stages.items() if name != process and at != "ready"]
            self._write(f"\r\x1b[K{self._time()} {' | '.join([f'{process}: {shown}', *others])[:_LIVE_WIDTH]}")
            if stage == "ready":
                self._line(f"{process}: {stage}")
        elif is_news:
            self._line(f"{process}: {stage}")

    def say(self, text: str) -> None:
        """A line of its own, with the time."""
        self._line(text)

    def note(self, text: str) -> None:
        """Text without the time, for people to copy."""
        self._write(f"{text}\n")

    def _line(self, text: str) -> None:
        clear = "\r\x1b[K" if self._live else ""
        self._write(f"{clear}{self._time()} {text}\n")

    def _time(self) -> str:
        return f"[{time.monotonic() - self._began:6.2f} s]"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
