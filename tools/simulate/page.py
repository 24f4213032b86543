"""The HTML page: one file without anything from outside, a table and charts, one colour a run."""

from collections.abc import Sequence

from tools.reports.charts import Bar, Line, legend, line_chart, stacked_bars
from tools.reports.page import POINTS, chart_grid, distribution_chart, document, table
from tools.simulate.costs import PARTS
from tools.simulate.observer import Sample, means
from tools.simulate.report import summary_rows
from tools.simulate.simulator import Run
from tools.simulate.summary import Summary, tpot, ttft

MAX_RUNS = 8  # as many colours can be told apart


def page(title: str, notes: Sequence[str], runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    """The whole document, for at most `MAX_RUNS` runs."""
    labels = [run.setup.label for run in runs]
    colors = list(range(len(runs)))

    def lines(points: Sequence[Sequence[tuple[float, float]]]) -> list[Line]:
        return [Line(label, color, line) for label, color, line in zip(labels, colors, points, strict=True)]

    share = "{:.0%}".format
    charts = [
        distribution_chart(name, list(zip(labels, colors, found, strict=True)))
        for name, found in (
            ("TTFT", [ttft(run.observer) for run in runs]),
            ("TPOT", [tpot(run.observer) for run in runs]),
        )
    ]
    charts += [
        line_chart(
            name,
            lines([over_time(run.observer.samples, field, run.simulated_seconds) for run in runs]),
            x_label="time since the first arrival (s)",
            y_label=y_label,
            x_format="{:,.0f}".format,
            y_format=y_format,
        )
        for name, field, y_label, y_format in (
            ("Requests that wait", "waiting", "requests", "{:,.0f}".format),
            ("Requests that run", "running", "requests", "{:,.0f}".format),
            ("KV blocks in use by running requests", "kv_share", "share of the pool", share),
        )
    ]
    charts.append(
        stacked_bars(
            "What the device's time went into",
            [Bar(run.setup.label, _shares(run)) for run in runs],
            [*PARTS, "idle"],
        )
    )
    return document(
        title,
        notes,
        [
            legend(list(zip(labels, colors, strict=True))),
            chart_grid(charts),
            table(labels, summary_rows(summaries)),
        ],
    )


def over_time(samples: Sequence[Sample], field: str, end: float) -> list[tuple[float, float]]:
    """Means of a gauge in `POINTS` equal spans of time."""
    if end <= 0:
        return []
    width = end / POINTS
    return [((index + 0.5) * width, value) for index, value in enumerate(means(samples, field, end, POINTS).tolist())]


def _shares(run: Run) -> list[float]:
    total = max(run.simulated_seconds, sum(run.parts)) or 1.0
    shares = [part / total for part in run.parts]
    return [*shares, max(0.0, 1 - sum(shares))]
