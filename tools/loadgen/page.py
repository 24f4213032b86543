"""The HTML page of a run, or of the rates that were tried."""

from collections.abc import Sequence
from html import escape

import numpy as np

from tools.loadgen.latencies import latencies_of, server_latencies
from tools.loadgen.messages import Record
from tools.loadgen.rate_search import Found, Probe
from tools.loadgen.report import (
    PROBE_LABELS,
    SPREAD_LABELS,
    check_rows,
    failures_text,
    found_rows,
    probe_rows,
    run_rows,
    spread_rows,
    void_text,
)
from tools.loadgen.slo import Slo
from tools.loadgen.summary import Summary
from tools.reports.charts import Line, line_chart
from tools.reports.page import (
    chart_grid,
    distribution_chart,
    document,
    explanation,
    short_seconds,
    side_by_side,
    table,
)
from tools.reports.percentiles import Floats

_SPANS = 40  # of the time axis
_FULL_SPAN = 10  # requests that a span has on average, at least, where percentiles of it are shown
_DOTS = 2000  # requests that are shown one by one
_TERMS = [
    ("TTFT", "time to first token: from when the request was due, not from when it was sent"),
    ("TPOT", "time per output token: (last - first token) / (tokens - 1), one value a request"),
    ("ITL", "inter-token latency: each gap between two chunks divided by the tokens of the later one"),
    ("ICL", "inter-chunk latency: each gap between two chunks of a stream"),
    ("E2E", "from when the request was due to its last token"),
    ("queue time", "on the server, until the first step that computes tokens of the request"),
    ("goodput", "requests a second that were answered and met all limits of the SLO; whatever failed is a miss"),
    ("95% interval", "where the true value lies, if requests are independent; under overload it is wider"),
    ("-", "there are too few values to say it: p99 needs 100"),
]
_SHARE = "{:.0%}".format
_NUMBER = "{:,.4g}".format

Points = list[tuple[float, float]]


def run_page(title: str, notes: Sequence[str], records: Sequence[Record], summary: Summary) -> str:
    """Distributions and courses of one run."""
    return document(title, notes, [_void(summary), *_run_parts(records, summary), explanation("Terms", _TERMS)])


def search_page(
    title: str,
    notes: Sequence[str],
    probes: Sequence[Probe],
    results: Sequence[Found],
    best: tuple[Sequence[Record], Summary] | None,
) -> str:
    """Rates and what met the SLO at each; below, the run at the highest rate of the first target."""
    ordered = sorted(probes, key=lambda probe: probe.rate)
    counted = [probe for probe in ordered if not probe.void]
    charts = [
        line_chart(
            "Requests within the SLO at each rate",
            [
                Line("within the SLO", 0, [(probe.rate, probe.share) for probe in counted]),
                Line("95% interval", 5, [(probe.rate, probe.share_low) for probe in counted]),
                Line("", 5, [(probe.rate, probe.share_high) for probe in counted]),
                Line("", 0, [(probe.rate, probe.share) for probe in counted], dots=True),
                *_void_rates(ordered, [probe.share for probe in ordered]),
            ],
            x_label="arrival rate (requests/s)",
            y_label="share of requests",
            x_format=_NUMBER,
            y_format=_SHARE,
            x_from=0.0,
            y_high=1.0,
            named=True,
        ),
        line_chart(
            "Goodput at each rate",
            [
                Line("goodput", 0, [(probe.rate, probe.goodput) for probe in counted]),
                Line("", 0, [(probe.rate, probe.goodput) for probe in counted], dots=True),
                Line("all requests", 5, [(0.0, 0.0), (ordered[-1].rate, ordered[-1].rate)] if ordered else []),
                *_void_rates(ordered, [probe.goodput for probe in ordered]),
            ],
            x_label="arrival rate (requests/s)",
            y_label="requests/s within the SLO",
            x_format=_NUMBER,
            y_format=_NUMBER,
            x_from=0.0,
            named=True,
        ),
    ]
    parts = [
        side_by_side([table(["rate"], found_rows(results)), table(PROBE_LABELS, probe_rows(ordered))], wide=True),
        chart_grid(charts),
    ]
    if best is not None:
        parts += [f"<h2>The run at {best[1].offered_rate:.3f} req/s</h2>", *_run_parts(*best)]
    return document(title, notes, [*parts, explanation("Terms", _TERMS)])


def _void_rates(probes: Sequence[Probe], values: Sequence[float]) -> list[Line]:
    """Those at which the client was the bottleneck, so that they say nothing of the server."""
    points = [(probe.rate, value) for probe, value in zip(probes, values, strict=True) if probe.void]
    return [Line("void", 4, points, dots=True)] if points else []


def _run_parts(records: Sequence[Record], summary: Summary) -> list[str]:
    measured = [record for record in records if record.measured and record.outcome == "ok"]
    found = [latencies_of(record) for record in measured]
    slo = Slo() if summary.goodput is None else summary.goodput.slo

    def distribution(name: str, values: Sequence[float], limit: float | None = None) -> str:
        return distribution_chart(name, [(name, 0, np.array(values))], limit=_mark(limit))

    charts = []
    if found:
        tpot = [latencies.tpot for latencies in found if latencies.tpot is not None]
        gaps = [
            ("ITL", 0, np.concatenate([latencies.itl for latencies in found])),
            ("ICL", 1, np.concatenate([latencies.icl for latencies in found])),
        ]
        charts = [
            distribution("TTFT", [latencies.ttft for latencies in found], slo.ttft),
            distribution("TPOT", tpot, slo.tpot),
            distribution("E2E", [latencies.e2e for latencies in found], slo.e2e),
            distribution_chart("ITL and ICL", gaps, of="gaps", limit=_mark(slo.itl), named=True),
        ]
    queued = [ours.queue for record in measured if record.timings and (ours := server_latencies(record.timings))]
    if waits := [seconds for seconds in queued if seconds is not None]:
        charts.append(distribution("Queue time on the server", waits))
    charts += _courses(records, measured, [latencies.ttft for latencies in found])
    return [
        table(SPREAD_LABELS, spread_rows(summary)) if found else "",
        side_by_side(
            [table(["this run"], run_rows(summary)), table(["client and server"], check_rows(summary))], wide=True
        ),
        f"<pre>{escape(failures_text(summary))}</pre>" if summary.failures else "",
        chart_grid(charts),
    ]


def _mark(seconds: float | None) -> tuple[float, str] | None:
    """Of a limit in a chart."""
    return None if seconds is None else (seconds, "SLO")


def _courses(records: Sequence[Record], measured: Sequence[Record], ttft: Sequence[float]) -> list[str]:
    """Charts over the time of the run."""
    if not records:
        return []
    end = max(record.ended for record in records) or 1.0
    edges = np.linspace(0.0, end, _SPANS + 1)
    width = end / _SPANS
    answered = [record for record in records if record.outcome == "ok"]
    failed = [record for record in records if record.outcome not in ("ok", "cancelled")]
    tokens_at = np.concatenate([np.empty(0), *(record.times for record in answered)])
    tokens = np.concatenate(
        [np.empty(0), *(record.tokens or [1] * len(record.times) for record in answered)]
    )  # chunks, where tokens are not known

    def chart(
        title: str,
        lines: Sequence[Line],
        y_label: str,
        seconds: bool = False,
        x_label: str = "time since the start (s)",
    ) -> str:
        return line_chart(
            title,
            lines,
            x_label=x_label,
            y_label=y_label,
            x_format=_NUMBER,
            y_format=short_seconds if seconds else _NUMBER,
            x_from=0.0,
            named=len(lines) > 1,
        )

    def rate(times: Sequence[float] | Floats, weights: Floats | None = None) -> Points:
        counts = np.histogram(times, edges, weights=weights)[0] / width
        return _centres(edges, counts)

    due = "when the request was due (s since the start)"
    ends = [
        Line(name, color, rate([record.ended for record in some]))
        for name, color, some in (("answered", 1, answered), ("not answered", 4, failed))
        if some
    ]
    lags = sorted((record.scheduled, record.sent - record.scheduled) for record in records)
    first = [chart("TTFT of each request", _ttft_course(measured, ttft), "TTFT", seconds=True, x_label=due)]
    return [
        *(first if measured else ()),
        chart("Requests a second", [Line("sent", 0, rate([record.sent for record in records])), *ends], "requests/s"),
        chart("Output tokens a second", [Line("tokens", 0, rate(tokens_at, tokens))], "tokens/s"),
        chart("Requests in flight", [Line("in flight", 0, _in_flight(records, edges))], "requests"),
        chart(
            "How late the client sent each request",
            [Line("send lag", 0, _thinned(lags), dots=True)],
            "send lag",
            seconds=True,
            x_label=due,
        ),
    ]


def _centres(edges: Floats, values: Floats) -> Points:
    return list(zip(((edges[1:] + edges[:-1]) / 2).tolist(), values.tolist(), strict=True))


def _thinned(points: Points) -> Points:
    """At most `_DOTS` of them, the highest always with them."""
    every = -(-len(points) // _DOTS)
    if every <= 1:
        return points
    return [max(points[at : at + every], key=lambda point: point[1]) for at in range(0, len(points), every)]


def _ttft_course(measured: Sequence[Record], ttft: Sequence[float]) -> list[Line]:
    """Each request, and percentiles where there are enough of them."""
    points = sorted(zip((record.scheduled for record in measured), ttft, strict=True))
    lines = [Line("request", 5, _thinned(points), dots=True)]
    if (spans := min(_SPANS, len(points) // _FULL_SPAN)) < 3:
        return lines
    due, values = np.array(points).T
    edges = np.linspace(due[0], due[-1], spans + 1)
    for color, (name, percent) in enumerate((("median", 50), ("p90", 90))):
        lines.append(Line(name, color, _quantile_course(due, values, edges, percent)))
    return lines


def _quantile_course(due: Floats, values: Floats, edges: Floats, percent: int) -> Points:
    """Of the values in each span that has some."""
    span_of = np.clip(np.searchsorted(edges, due, "right") - 1, 0, len(edges) - 2)
    middle = (edges[1:] + edges[:-1]) / 2
    return [
        (float(middle[span]), float(np.percentile(values[span_of == span], percent)))
        for span in np.unique(span_of).tolist()
    ]


def _in_flight(records: Sequence[Record], edges: Floats) -> Points:
    """Mean in each span."""
    sent, ended = np.array([[record.sent, record.ended] for record in records]).T
    seconds = [float((np.minimum(ended, edge) - np.minimum(sent, edge)).sum()) for edge in edges]
    return _centres(edges, np.diff(seconds) / np.diff(edges))


def _void(summary: Summary) -> str:
    text = void_text(summary)
    return f'<pre class="void">{escape(text)}</pre>' if text else ""
