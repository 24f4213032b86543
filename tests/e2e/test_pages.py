"""Pages of results in a real browser: nothing is cut off or drawn over something else, on any screen, light or dark."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import CHROMIUM, Page, browser
from tests.unit.tools.loadgen.test_page import answered, failed, probe, summary_of
from tools.loadgen.page import run_page, search_page
from tools.loadgen.rate_search import TARGETS, found

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")]

SIZES = [(390, 844), (768, 1024), (1440, 900), (2560, 1440)]
# What stands in the same picture and overlaps, and what is wider than the page.
OVERLAPS = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].filter(text => text.getBoundingClientRect().width)
  const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()])
  return boxes.flatMap(([name, a], at) => boxes.slice(at + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
    .map(([other]) => name + ' | ' + other))
})"""
CUT_OFF = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect()
  return [...svg.querySelectorAll('text')].filter(text => text.getBoundingClientRect().width)
    .filter(text => { const box = text.getBoundingClientRect()
      return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1 })
    .map(text => text.textContent)
})"""
SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll('svg text')]
  .filter(text => text.getBoundingClientRect().width)
  .map(text => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a))"""
CONTRAST = """(() => {
  const light = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number).map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0)
  const card = light(getComputedStyle(document.querySelector('figure')).backgroundColor)
  return Math.min(...[...document.querySelectorAll('path.line')].map(line => light(getComputedStyle(line).stroke))
    .map(stroke => (Math.max(stroke, card) + 0.05) / (Math.min(stroke, card) + 0.05)))
})()"""


async def check(page: Page, address: str) -> None:
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            await page.open(address, width=width, height=height, scheme=scheme)
            where = f"{width} wide, {scheme}"
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, where
            found: Any = await page.evaluate(OVERLAPS)
            assert found == [], where
            assert await page.evaluate(CUT_OFF) == [], where
            assert await page.evaluate(SMALLEST_TEXT) >= 9, where
            assert await page.evaluate(CONTRAST) >= 2, where
    assert page.requested[-1] == address
    assert [request for request in page.requested if not request.startswith(("file:", "about:"))] == []
    assert page.problems == []


def test_everything_can_be_read(tmp_path: Path) -> None:
    records = [*answered(300), *failed(5)]
    void = run_page("A void run", ["note"], records, summary_of(records, lag=1.0))
    probes = [probe(2.0, 1.0), probe(4.0, 0.9), probe(8.0, 0.2), probe(6.0, 0.9, void=True)]
    results = [found(probes, target) for target in TARGETS]
    search = search_page("A search", ["note"], probes, results, (answered(40), summary_of(answered(40))))

    async def look() -> None:
        async with browser(tmp_path / "profile") as page:
            for name, text in (("run", void), ("search", search)):
                path = tmp_path / f"{name}.html"
                path.write_text(text, "utf-8")
                await check(page, path.as_uri())

    asyncio.run(asyncio.wait_for(look(), 300))
