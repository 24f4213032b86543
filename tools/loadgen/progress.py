"""A line on stderr that says how far a run is."""

import sys

from tools.loadgen.messages import Record


class ProgressLine:
    """Rewritten in place on a terminal, now and then elsewhere; rates are of the time since the last one."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._live = sys.stderr.isatty()
        self.period = 1.0 if self._live else 5.0  # seconds from line to line
        self._ok = self._failed = 0
        self._worst_lag = 0.0
        self._before = 0.0, 0, 0  # seconds, requests sent and tokens at the last line

    def add(self, record: Record) -> None:
        """One that has ended."""
        if record.outcome == "ok":
            self._ok += 1
        else:
            self._failed += 1
        self._worst_lag = max(self._worst_lag, record.sent - record.scheduled)

    def show(self, seconds: float, *, sent: int, tokens: int, cpu: float) -> None:
        then, sent_then, tokens_then = self._before
        self._before = seconds, sent, tokens
        span = max(1e-9, seconds - then)
        flying = max(0, sent - self._ok - self._failed)
        print(
            f"[{seconds:5.0f} s] {sent:,} of {self._total:,} sent ({(sent - sent_then) / span:.1f}/s), {flying:,} in "
            f"flight, {self._ok:,} ok, {self._failed:,} not; {max(0, tokens - tokens_then) / span:,.0f} tok/s; client: "
            f"send lag <= {self._worst_lag * 1e3:.0f} ms, {cpu:.0%} of a core   ",
            end="\r" if self._live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
