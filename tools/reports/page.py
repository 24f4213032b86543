"""HTML pages of results: one file without anything from outside, charts and tables."""

from collections.abc import Sequence
from html import escape

import numpy as np

from tools.reports.charts import Line, line_chart
from tools.reports.percentiles import Floats
from tools.reports.table import Rows

POINTS = 240  # of a line
_SHORTEST = 1e-4  # seconds, on a logarithmic axis: tokens that come together would stretch it without end

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #6a7078; --line: #d9dce0; --paper: #ffffff; --card: #f7f8f9;
  --alarm: #d55e00 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --dim: #9aa1a9; --line: #3a3f45; --paper: #16181b; --card: #1e2125; --alarm: #f0803c }
}
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1320px; padding: 0 1rem }
h1 { font-size: 1.35rem; margin: 0 } .note { color: var(--dim); margin: .2rem 0 1rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(540px, 100%), 1fr)); gap: 1rem }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .7rem }
figcaption { font-weight: 600; margin-bottom: .3rem } svg { width: 100%; height: auto; display: block }
text { fill: var(--dim); font-size: 12px } .grid { stroke: var(--line); stroke-width: .6; fill: none }
.axis { stroke: var(--dim); fill: none } .line { fill: none; stroke: currentColor; stroke-width: 1.8 }
.legend { margin: .6rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem;
  background: currentColor; vertical-align: -1px }
.dots { fill: none; stroke: currentColor; stroke-width: 5; stroke-linecap: round; opacity: .75 }
path.limit { stroke: var(--alarm); stroke-dasharray: 5 4; fill: none } text.limit { fill: var(--alarm) }
.legend i[class^=p] { background: var(--fill) } rect { fill: var(--fill) }
.c0 { color: #0072b2 } .c1 { color: #e69f00 } .c2 { color: #009e73 } .c3 { color: #cc79a7 }
.c4 { color: #d55e00 } .c5 { color: #56b4e9 } .c6 { color: #8a6d3b } .c7 { color: #7b61c9 }
.p0 { --fill: #8a929b } .p1 { --fill: #0072b2 } .p2 { --fill: #e69f00 } .p3 { --fill: #f0d27a }
.p4 { --fill: #56b4e9 } .p5 { --fill: var(--line) }
@media (prefers-color-scheme: dark) {
  .c0, .p1 { color: #4ba3e3; --fill: #4ba3e3 } .c3 { color: #dd93bd } .c4 { color: #f0803c } .c5 { color: #a9dcf8 }
  .c6 { color: #c2a36b } .c7 { color: #a593f2 } .p4 { --fill: #a9dcf8 }
}
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .9rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
td:first-child, th:first-child { text-align: left } th { font-weight: 600 }
.none { color: var(--dim) }
h2 { font-size: 1.1rem; margin: 1.4rem 0 .4rem } pre { white-space: pre-wrap; margin: .6rem 0 }
.void { border: 2px solid var(--alarm); border-radius: 6px; padding: .6rem; margin-bottom: 1rem; font-weight: 600 }
.tables { display: flex; flex-wrap: wrap; column-gap: 3rem; align-items: flex-start } .tables > * { max-width: 100% }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .6rem 0 } dd { margin: 0 }
dt { font-weight: 600 } .explained { color: var(--dim); max-width: 60rem }
@media (max-width: 640px) {
  body { margin: 1rem auto; padding: 0 .7rem } figure { padding: .5rem .3rem } text { font-size: 16px }
  text.sideways { display: none }
  td, th { padding-right: .6rem } td:first-child { white-space: normal; min-width: 7rem }
  .wide td { white-space: normal }
}
"""


def document(title: str, notes: Sequence[str], parts: Sequence[str]) -> str:
    """The whole page: a heading, lines of text below it, and parts that are HTML already."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
        + "".join(parts)
        + "</body></html>\n"
    )


def chart_grid(charts: Sequence[str]) -> str:
    """Charts side by side, as many as the window has room for."""
    return f'<div class="charts">{"".join(charts)}</div>'


def table(labels: Sequence[str], rows: Rows) -> str:
    """Names on the left, a column of values for each label."""
    head = "".join(f"<th>{escape(label)}</th>" for label in labels)
    body = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'


def side_by_side(tables: Sequence[str], *, wide: bool = False) -> str:
    """Tables beside each other where the window has room. `wide`: long values are broken on a narrow screen."""
    return f'<div class="tables{" wide" if wide else ""}">{"".join(tables)}</div>'


def explanation(title: str, terms: Sequence[tuple[str, str]]) -> str:
    """A list of terms and what they mean."""
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in terms)
    return f'<div class="explained"><h2>{escape(title)}</h2><dl>{rows}</dl></div>'


def distribution_chart(
    name: str,
    lines: Sequence[tuple[str, int, Floats]],
    *,
    of: str = "requests",
    limit: tuple[float, str] | None = None,
    named: bool = False,
) -> str:
    """Which share of values lies at or below each value; `lines`: label, colour and seconds of each.

    `limit`: seconds that are marked, and the name of the mark.
    """
    return line_chart(
        f"{name}: share of {of} at or below",
        [Line(label, color, _distribution(values)) for label, color, values in lines],
        x_label=f"{name} (logarithmic)",
        y_label=f"share of {of}",
        x_format=short_seconds,
        y_format="{:.0%}".format,
        log_x=True,
        y_high=1.0,
        limit=limit,
        named=named,
    )


def _distribution(values: Floats) -> list[tuple[float, float]]:
    """Corners of the empirical distribution function, at most `POINTS` steps; values below `_SHORTEST` stand there."""
    if not len(values):
        return []
    ordered = np.maximum(np.sort(values), _SHORTEST)
    chosen = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), POINTS)).round().astype(int))
    corners = []
    share = 0.0
    for index in chosen.tolist():
        value = float(ordered[index])
        corners.append((value, share))  # it rises at the value, not on the way to it
        share = (index + 1) / len(ordered)
        corners.append((value, share))
    return corners


def short_seconds(value: float) -> str:
    """A tick's text."""
    if value == 0:
        return "0"
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms" if value >= 1e-3 else f"{value * 1e6:g} µs"
