"""The HTML page: one file without anything from outside, a table and charts, one colour a run."""

from collections.abc import Sequence
from html import escape

import numpy as np

from tools.simulate.charts import Bar, Line, legend, line_chart, stacked_bars
from tools.simulate.costs import PARTS
from tools.simulate.observer import Floats, Sample, means
from tools.simulate.report import summary_rows
from tools.simulate.simulator import Run
from tools.simulate.summary import Summary, tpot, ttft

_POINTS = 240  # of a line
MAX_RUNS = 8  # as many colours can be told apart

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #6a7078; --line: #d9dce0; --paper: #ffffff; --card: #f7f8f9 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --dim: #9aa1a9; --line: #3a3f45; --paper: #16181b; --card: #1e2125 }
}
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1320px; padding: 0 1rem }
h1 { font-size: 1.35rem; margin: 0 } .note { color: var(--dim); margin: .2rem 0 1rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1rem }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .7rem }
figcaption { font-weight: 600; margin-bottom: .3rem } svg { width: 100%; height: auto; display: block }
text { fill: var(--dim); font-size: 12px } .grid { stroke: var(--line); stroke-width: .6; fill: none }
.axis { stroke: var(--dim); fill: none } .line { fill: none; stroke: currentColor; stroke-width: 1.8 }
.legend { margin: .6rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem;
  background: currentColor; vertical-align: -1px }
.legend i[class^=p] { background: var(--fill) } rect { fill: var(--fill) }
.c0 { color: #0072b2 } .c1 { color: #e69f00 } .c2 { color: #009e73 } .c3 { color: #cc79a7 }
.c4 { color: #d55e00 } .c5 { color: #56b4e9 } .c6 { color: #8a6d3b } .c7 { color: #7b61c9 }
.p0 { --fill: #8a929b } .p1 { --fill: #0072b2 } .p2 { --fill: #e69f00 } .p3 { --fill: #f0d27a }
.p4 { --fill: #56b4e9 } .p5 { --fill: var(--line) }
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .9rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
td:first-child, th:first-child { text-align: left } th { font-weight: 600 }
.none { color: var(--dim) }
"""


def page(title: str, notes: Sequence[str], runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    """The whole document, for at most `MAX_RUNS` runs."""
    labels = [run.setup.label for run in runs]
    colors = list(range(len(runs)))

    def lines(points: Sequence[Sequence[tuple[float, float]]]) -> list[Line]:
        return [Line(label, color, line) for label, color, line in zip(labels, colors, points, strict=True)]

    share = "{:.0%}".format
    charts = [
        line_chart(
            f"{name}: share of requests at or below",
            lines([distribution(values) for values in found]),
            x_label=f"{name} (logarithmic)",
            y_label="share of requests",
            x_format=_short_seconds,
            y_format=share,
            log_x=True,
            y_high=1.0,
        )
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
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, values in summary_rows(summaries)
    )
    head = "".join(f"<th>{escape(label)}</th>" for label in labels)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
        + legend(list(zip(labels, colors, strict=True)))
        + f'<div class="charts">{"".join(charts)}</div>'
        + f'<div class="scroll"><table><tr><th></th>{head}</tr>{rows}</table></div></body></html>\n'
    )


def distribution(values: Floats) -> list[tuple[float, float]]:
    """Points of the empirical distribution function, at most `_POINTS`; values of 0 stand at a microsecond."""
    if not len(values):
        return []
    ordered = np.maximum(np.sort(values), 1e-6)
    chosen = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _POINTS)).round().astype(int))
    return [(float(ordered[index]), (index + 1) / len(ordered)) for index in chosen.tolist()]


def over_time(samples: Sequence[Sample], field: str, end: float) -> list[tuple[float, float]]:
    """Means of a gauge in `_POINTS` equal spans of time."""
    if end <= 0:
        return []
    width = end / _POINTS
    return [((index + 0.5) * width, value) for index, value in enumerate(means(samples, field, end, _POINTS).tolist())]


def _shares(run: Run) -> list[float]:
    total = max(run.simulated_seconds, sum(run.parts)) or 1.0
    shares = [part / total for part in run.parts]
    return [*shares, max(0.0, 1 - sum(shares))]


def _short_seconds(value: float) -> str:
    """A tick's text."""
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms" if value >= 1e-3 else f"{value * 1e6:g} µs"
