"""A run's numbers as rows of tables."""

from collections.abc import Sequence

from tools.loadgen.lag import Lag
from tools.loadgen.messages import Outcome
from tools.loadgen.rate_search import Found, Probe
from tools.loadgen.slo import Slo
from tools.loadgen.summary import Difference, Estimate, Exactness, Spread, Summary
from tools.reports.table import Rows, render, seconds

SPREAD_LABELS = ("n", "mean", "p50 (95% interval)", "p90", "p99")
PROBE_LABELS = ("measured", "within the SLO (95% interval)", "goodput")

_OUTCOMES: dict[Outcome, str] = {
    "ok": "answered",
    "refused": "refused (429, 503)",
    "http": "other HTTP errors",
    "connection": "connection failed",
    "truncated": "truncated streams",
    "error": "error events in streams",
    "empty": "answers without a token",
    "timeout": "not ended in time",
}


def spread_rows(summary: Summary) -> Rows:
    """Distributions of latencies, for `SPREAD_LABELS`."""
    spreads = [
        ("TTFT", summary.ttft),
        ("TPOT", summary.tpot),
        ("ITL", summary.itl),
        ("ICL", summary.icl),
        ("E2E", summary.e2e),
        ("queue time (server)", summary.queue),
    ]
    return [(name, _spread(spread)) for name, spread in spreads if spread.n]


def run_rows(summary: Summary) -> Rows:
    """What became of the requests, in one column."""
    rows = [
        ("requests sent / measured", f"{summary.sent:,} / {summary.measured:,}"),
        *(
            (name, f"{summary.outcomes[outcome]:,}")
            for outcome, name in _OUTCOMES.items()
            if outcome in summary.outcomes
        ),
        ("rate of requests", f"{summary.offered_rate:.3f} req/s" if summary.offered_rate else "-"),
    ]
    if (goodput := summary.goodput) is not None:
        rows += [
            (f"goodput ({slo_text(goodput.slo)})", f"{goodput.rate:.3f} req/s"),
            (
                "requests within the SLO",
                f"{goodput.met:,} ({goodput.share:.1%}; {goodput.share_low:.1%} to {goodput.share_high:.1%})",
            ),
        ]
        if goodput.unknown:
            rows.append(("misses: the server does not tell its tokens", f"{goodput.unknown:,}"))
    rows += [
        ("output tokens, throughput", f"{summary.output_tokens:,}, {summary.output_throughput:,.1f} tok/s"),
        ("prompt throughput", f"{summary.prompt_throughput:,.1f} tok/s"),
    ]
    if summary.cached_share is not None:
        rows.append(("prompt tokens from the cache", f"{summary.cached_share:.1%}"))
    for name, exactness in (("prompt", summary.prompt_exact), ("output", summary.output_exact)):
        if exactness.compared:
            rows.append((f"{name} lengths as asked", _exactness(exactness)))
    if summary.uncounted:
        rows.append(("answers without tokens per chunk (no ITL)", f"{summary.uncounted:,}"))
    if summary.miscounted:
        rows.append(("answers whose chunks and usage differ in tokens", f"{summary.miscounted:,}"))
    rows.append(("time, first due to last token", seconds(summary.seconds)))
    return [(name, [value]) for name, value in rows]


def check_rows(summary: Summary) -> Rows:
    """How far the numbers can be trusted: the client's own, and what the server says, in one column."""
    return [(name, [value]) for name, value in [*_client(summary), *_server(summary)]]


def _client(summary: Summary) -> list[tuple[str, str]]:
    client = summary.client
    return [
        ("client: send lag p50 / p99 / max", _lag(client.send_lag)),
        ("client: wait for the event loop", _lag(client.loop_lag)),
        ("client: share of a core, each process", ", ".join(f"{share:.0%}" for share in client.cpu)),
        ("client: the same, peak", ", ".join(f"{share:.0%}" for share in client.cpu_peak)),
    ]


def _server(summary: Summary) -> list[tuple[str, str]]:
    agreement = summary.agreement
    if agreement is None:
        return []
    rows = [("joined with the server's timeline", f"{agreement.joined:,}")]
    for name, difference in (("TTFT", agreement.ttft), ("TPOT", agreement.tpot), ("ITL", agreement.itl)):
        if difference is not None:
            rows.append((f"{name}: client - server p50, within 2 ms or 2%", _difference(difference)))
    return [*rows, ("preemptions", f"{agreement.preemptions:,}")]


def void_text(summary: Summary) -> str:
    """The big line of a run that does not count; empty for one that does."""
    if not summary.client.void:
        return ""
    return "VOID: the load generator was the bottleneck; these numbers say nothing of the server.\n" + "\n".join(
        f"  - {reason}" for reason in summary.client.void
    )


def text_report(label: str, summary: Summary) -> str:
    """Everything for the terminal."""
    parts = [
        void_text(summary),
        render(SPREAD_LABELS, spread_rows(summary)),
        render([label], [*run_rows(summary), *check_rows(summary)]),
        failures_text(summary),
        void_text(summary),  # again where the eye ends
    ]
    return "\n\n".join(part for part in parts if part)


def failures_text(summary: Summary) -> str:
    if not summary.failures:
        return ""
    lines = [f"  {failure.id}: {failure.outcome}: {failure.detail}" for failure in summary.failures]
    return "the first requests that failed:\n" + "\n".join(lines)


def probe_rows(probes: Sequence[Probe]) -> Rows:
    """Rates that were tried, in order of the rate, for `PROBE_LABELS`."""
    return [
        (
            f"{probe.rate:.3f} req/s" + (" VOID" if probe.void else ""),
            [
                f"{probe.measured:,}",
                f"{probe.share:.1%} ({probe.share_low:.1%} to {probe.share_high:.1%})",
                f"{probe.goodput:.3f} req/s",
            ],
        )
        for probe in sorted(probes, key=lambda probe: probe.rate)
    ]


def found_rows(results: Sequence[Found]) -> Rows:
    """The highest rates, in one column."""
    rows: Rows = []
    for result in results:
        if result.rate is None:
            text = f"none: missed at {result.missed_at:.3f} req/s" if result.missed_at else "none"
        elif result.missed_at is None:
            text = f"{result.rate:.3f} req/s or more: no rate that was tried missed it"
        else:
            reason = "the client could not keep up" if result.client_limited else "missed"
            text = f"{result.rate:.3f} req/s ({reason} at {result.missed_at:.3f}: known to {result.known_to:.1%})"
        rows.append((f"highest rate with {result.target:.0%} within the SLO", [text]))
    return rows


def slo_text(slo: Slo) -> str:
    limits = ((name.upper(), getattr(slo, name)) for name in slo.__struct_fields__)
    return ", ".join(f"{name} {seconds(limit)}" for name, limit in limits if limit is not None)


def _spread(spread: Spread) -> list[str]:
    return [f"{spread.n:,}", seconds(spread.mean), *map(_estimate, (spread.p50, spread.p90, spread.p99))]


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    factor = 1.0 if estimate.value >= 1 else 1e3  # both bounds in the unit of the value
    bounds = ["-" if bound is None else _short(bound * factor) for bound in (estimate.low, estimate.high)]
    return f"{seconds(estimate.value)} ({' to '.join(bounds)})"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _lag(lag: Lag) -> str:
    return " / ".join(seconds(value) for value in (lag.p50, lag.p99, lag.max))


def _exactness(exactness: Exactness) -> str:
    text = f"{exactness.exact:,} of {exactness.compared:,}"
    if exactness.differences:
        found = ", ".join(f"{difference:+d}: {count:,}" for difference, count in exactness.differences.items())
        text += f"; by so many tokens too many or few: {found}"
    return text


def _difference(difference: Difference) -> str:
    share = difference.agree / difference.n
    return f"{difference.p50 * 1e3:+.2f} ms, {difference.agree:,} of {difference.n:,} ({share:.1%})"
