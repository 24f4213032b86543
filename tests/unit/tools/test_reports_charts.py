"""Charts: what stands on the axes, and that nothing is drawn outside of the picture or over something else."""

import itertools
import re

import numpy as np
import pytest

from tools.reports.charts import Line, fitting_ticks, line_chart, log_ticks
from tools.reports.page import distribution_chart, short_seconds

WIDTH, LEFT, RIGHT = 620, 70, 608  # of the picture, and its axes
LETTER = 9.9  # of the largest text
RANGES = [(low, low * factor) for low in (1.3e-4, 0.0071, 0.9, 31.0, 4700.0) for factor in (1.01, 1.6, 4, 30, 900, 8e4)]


def places(svg: str) -> list[tuple[float, str]]:
    """Of the labels below the x axis: the middle of each, and its text."""
    found = re.findall(r'<text x="([\d.]+)" y="272" text-anchor="middle">([^<]*)</text>', svg)
    return [(float(x), text) for x, text in found]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_labels_of_the_axis_neither_touch_nor_leave_the_picture(low: float, high: float, log: bool) -> None:
    svg = line_chart(
        "t", [Line("l", 0, [(low, 1.0), (high, 2.0)])], x_label="x", y_label="y", x_format=short_seconds,
        y_format=str, log_x=log,
    )  # fmt: skip
    labels = places(svg)
    assert len(labels) >= 2
    boxes = [(x - len(text) * LETTER / 2, x + len(text) * LETTER / 2) for x, text in labels]
    assert boxes[0][0] > 0
    assert boxes[-1][1] <= WIDTH
    assert len(boxes) == 2 or all(left[1] < right[0] for left, right in itertools.pairwise(boxes))


def test_ticks_of_a_short_span_of_a_logarithmic_axis_are_there() -> None:
    assert log_ticks(1.1, 1.9) == []
    ticks = fitting_ticks(1.1, 1.9, True, lambda value: value * 500, str)
    assert len(ticks) >= 2
    assert all(1.1 <= value <= 1.9 for value, _ in ticks)


def test_a_distribution_rises_at_its_values() -> None:
    svg = distribution_chart("TTFT", [("TTFT", 0, np.array([1.0, 10.0]))])
    [path] = re.findall(r'class="line c0" d="M([^"]*)"', svg)
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    top, middle, bottom = 12.0, (12 + 252) / 2, 252.0
    assert points == [(LEFT, bottom), (LEFT, middle), (RIGHT, middle), (RIGHT, top)]


@pytest.mark.parametrize("limit", [1e-3, 1.0, 3.0, 9.99, 500.0])
def test_a_limit_is_in_the_picture_wherever_the_values_are(limit: float) -> None:
    svg = distribution_chart("TTFT", [("TTFT", 0, np.array([1.0, 10.0]))], limit=(limit, "SLO"))
    [x] = re.findall(r'class="limit" d="M([\d.]+) ', svg)
    [(at, anchor)] = re.findall(r'class="limit" x="([\d.]+)" y="\d+" text-anchor="(\w+)"', svg)
    assert LEFT <= float(x) <= RIGHT
    width = len("SLO") * LETTER
    assert float(at) + width <= WIDTH if anchor == "start" else float(at) - width >= 0


def test_dots_are_not_joined() -> None:
    svg = line_chart(
        "t", [Line("l", 3, [(1.0, 1.0), (2.0, 0.0)], dots=True)], x_label="x", y_label="y", x_format=str, y_format=str,
        x_from=0.0, y_high=1.0,
    )  # fmt: skip
    assert re.findall(r'class="dots c3" d="([^"]*)"', svg) == ["M339.0 12.0h0M608.0 252.0h0"]
