"""Charts as inline SVG: lines with axes, and stacked bars. Colours and fonts come from the page's style sheet."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 620, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 12, 48
_BAR_HEIGHT, _BAR_GAP = 22, 12
_LABEL_WIDTH = 150

_LETTER = 9.9  # width of a digit where text is largest, on a narrow screen; see the style sheet
_GAP = 10.0  # between the labels of two ticks

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one run. `color`: its number in the style sheet. `dots`: they are not joined."""

    label: str
    color: int
    points: Sequence[tuple[float, float]]
    dots: bool = False


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


def log_ticks(low: float, high: float, factors: Sequence[int] = (1, 2, 5)) -> list[float]:
    """Powers of ten from `low` to `high`, times each of the factors."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def fitting_ticks(
    low: float, high: float, log: bool, place: Callable[[float], float], form: Format
) -> list[tuple[float, str]]:
    """As many ticks of a horizontal axis as have room for their labels, with these. `place`: of a value, in units."""
    if log:
        choices = [log_ticks(low, high, factors) for factors in ((1, 2, 5), (1, 3), (1,))]
        choices = [choice for choice in choices if len(choice) > 1] or [nice_ticks(low, high, 4)]
    else:
        choices = [nice_ticks(low, high, count) for count in (8, 5, 3)]
    for ticks in choices:
        labels = [form(tick) for tick in ticks]
        widths = [len(label) * _LETTER for label in labels]
        pairs = itertools.pairwise(zip(ticks, widths, strict=True))
        if all(place(right) - place(left) >= (wide + wider) / 2 + _GAP for (left, wide), (right, wider) in pairs):
            break
    return list(zip(ticks, labels, strict=True))


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_format: Format,
    y_format: Format,
    log_x: bool = False,
    x_from: float | None = None,
    y_high: float | None = None,
    limit: tuple[float, str] | None = None,
    named: bool = False,
) -> str:
    """A chart with a caption; without points it says so. y starts at 0; `log_x` needs points with x above 0.

    `x_from`: where x starts, instead of at the first point. `limit`: a value of x that is marked, and its name.
    `named`: with a legend of its own, for lines that are not the page's runs.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return _figure(title, '<p class="none">no data</p>')
    xs = [x for x, _ in points] + ([] if limit is None else [limit[0]])
    x_low, x_high = min(xs) if x_from is None else x_from, max(xs)
    if log_x and x_high < x_low * 1.001:  # equal but for rounding
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
    for tick, label in fitting_ticks(x_low, x_high, log_x, x_of, x_format):
        x = x_of(tick)
        body.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
        # The last one may not reach beyond the picture.
        x = min(x, _WIDTH - 2 - len(label) * _LETTER / 2)
        body.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{escape(label)}</text>')
    for tick in nice_ticks(0, y_top, 5):
        y = y_of(tick)
        body.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        body.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(y_format(tick))}</text>')
    body.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    body.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (_TOP + bottom) / 2
    turned = f'transform="translate(13 {middle}) rotate(-90)" text-anchor="middle"'
    body.append(f'<text class="sideways" {turned}>{escape(y_label)}</text>')
    for line in lines:
        if line.points:
            places = [f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in line.points]
            path = "".join(f"M{place}h0" for place in places) if line.dots else "M" + "L".join(places)
            kind = "dots" if line.dots else "line"
            body.append(f'<path class="{kind} c{line.color}" d="{path}"><title>{escape(line.label)}</title></path>')
    if limit is not None:
        body += _limit_mark(x_of(limit[0]), limit[1], right)
    names = legend([(line.label, line.color) for line in lines if line.label]) if named else ""
    return _figure(title, _svg(_HEIGHT, body) + names)


def _limit_mark(x: float, name: str, right: float) -> list[str]:
    """A vertical line with its name beside it, on the side that has room."""
    leftwards = x + len(name) * _LETTER > right
    anchor, shift = ("end", -5) if leftwards else ("start", 5)
    bottom = _HEIGHT - _BOTTOM
    place = f'x="{x + shift:.1f}" y="{bottom - 8}" text-anchor="{anchor}"'
    return [
        f'<path class="limit" d="M{x:.1f} {_TOP}V{bottom}"/>',
        f'<text class="limit" {place}>{escape(name)}</text>',
    ]


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
