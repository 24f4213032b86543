"""Charts as inline SVG: lines with axes, and stacked bars. Colours and fonts come from the page's style sheet."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 620, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 44
_BAR_HEIGHT, _BAR_GAP = 22, 12
_LABEL_WIDTH = 150

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one run. `color`: its number in the style sheet."""

    label: str
    color: int
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    parts: Sequence[float]  # shares, at most 1 together


def nice_ticks(low: float, high: float, count: int = 8) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from `low` to `high`; with few of them 2 and 5 times those as well."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_format: Format,
    y_format: Format,
    log_x: bool = False,
    y_high: float | None = None,
) -> str:
    """A chart with a caption; without points it says so. y starts at 0; `log_x` needs points with x above 0."""
    points = [point for line in lines for point in line.points]
    if not points:
        return _figure(title, '<p class="none">no data</p>')
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    if log_x and x_high <= x_low:
        x_low, x_high = x_low / 2, x_high * 2
    elif x_high <= x_low:
        x_high = x_low + 1
    y_top = y_high or max(y for _, y in points) * 1.05 or 1.0
    scale = math.log10 if log_x else float

    def x_of(value: float) -> float:
        return _LEFT + (scale(value) - scale(x_low)) / (scale(x_high) - scale(x_low)) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / y_top * (_HEIGHT - _TOP - _BOTTOM)

    body = []
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in log_ticks(x_low, x_high) if log_x else nice_ticks(x_low, x_high):
        x = x_of(tick)
        body.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
        body.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(x_format(tick))}</text>')
    for tick in nice_ticks(0, y_top, 5):
        y = y_of(tick)
        body.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        body.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(y_format(tick))}</text>')
    body.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    body.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (_TOP + bottom) / 2
    body.append(f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    for line in lines:
        if line.points:
            path = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in line.points)
            body.append(f'<path class="line c{line.color}" d="M{path}"><title>{escape(line.label)}</title></path>')
    return _figure(title, _svg(_HEIGHT, body))


def stacked_bars(title: str, bars: Sequence[Bar], names: Sequence[str]) -> str:
    """One bar a run, its parts in the order of `names`, with a legend of those."""
    body = []
    height = _TOP + len(bars) * (_BAR_HEIGHT + _BAR_GAP) + 22
    width = _WIDTH - _LABEL_WIDTH - _RIGHT
    for index, bar in enumerate(bars):
        y = _TOP + index * (_BAR_HEIGHT + _BAR_GAP)
        body.append(
            f'<text x="{_LABEL_WIDTH - 8}" y="{y + 15}" text-anchor="end">{escape(_shortened(bar.label))}</text>'
        )
        x = float(_LABEL_WIDTH)
        for part, share in enumerate(bar.parts):
            body.append(
                f'<rect class="p{part}" x="{x:.1f}" y="{y}" width="{share * width:.1f}" height="{_BAR_HEIGHT}">'
                f"<title>{escape(bar.label)}: {escape(names[part])} {share:.1%}</title></rect>"
            )
            x += share * width
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x = _LABEL_WIDTH + tick * width
        anchor = "end" if tick == 1 else "middle"
        body.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="{anchor}">{tick:.0%}</text>')
    legend = "".join(f'<span><i class="p{part}"></i>{escape(name)}</span>' for part, name in enumerate(names))
    return _figure(title, _svg(height, body) + f'<p class="legend">{legend}</p>')


def legend(labels: Sequence[tuple[str, int]]) -> str:
    """Names of the runs with their colours."""
    return (
        '<p class="legend">'
        + "".join(f'<span><i class="c{color}"></i>{escape(label)}</span>' for label, color in labels)
        + "</p>"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 24 else text[:23] + "…"


def _svg(height: float, body: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(body)}</svg>'


def _figure(title: str, content: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"
