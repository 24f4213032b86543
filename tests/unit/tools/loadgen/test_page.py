"""The page of a run: what is on it when all is well, when nothing is, and when there is very much."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from tools.loadgen.lag import Limits, WorkerLoad
from tools.loadgen.messages import Record
from tools.loadgen.page import run_page, search_page
from tools.loadgen.rate_search import TARGETS, Probe, found
from tools.loadgen.slo import parse_slo
from tools.loadgen.summary import Summary, summarize

from .test_summary import record

_VOID_ELEMENTS = {"meta", "br"}


class Checker(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in _VOID_ELEMENTS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def answered(number: int, **fields: Any) -> list[Record]:
    return [record(at, at / 4, [at / 4 + 0.1 + at % 7 / 10, at / 4 + 1.0], **fields) for at in range(number)]


def failed(number: int) -> list[Record]:
    return [record(at, at / 4, [], outcome="refused", detail="503: <busy>", tokens=[]) for at in range(number)]


def summary_of(records: Sequence[Record], lag: float = 0.0) -> Summary:
    load = WorkerLoad([(at * (0.01 + lag), lag) for at in range(50)], 0.01, [(0.0, 1e4, 0.1)])
    return summarize(records, workers=[load], limits=Limits(), slo=parse_slo("ttft=500ms,tpot=2s"), added_tokens=0)


def checked(page: str) -> str:
    """The page, whose form is right and whose pictures stay within themselves."""
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert not re.search(r"\b(nan|inf|None)\b", page)
    for path in re.findall(r' d="([^"]*)"', page):
        for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", path):
            assert 0 <= float(x) <= 620
            assert 0 <= float(y) <= 300
    return page


def captions(page: str) -> list[str]:
    return re.findall(r"<figcaption>([^<]*)</figcaption>", page)


CASES = {
    "one": answered(1),
    "one token each": [record(at, at / 4, [at / 4 + 0.1]) for at in range(3)],
    "at one moment": [record(at, 0.0, [0.5, 0.6]) for at in range(60)],
    "some": answered(40),
    "some failed": [*answered(40), *failed(7)],
    "many": answered(9000),
}


@pytest.mark.parametrize("records", CASES.values(), ids=CASES)
def test_the_page_is_whole_whatever_the_run_was(records: list[Record]) -> None:
    page = checked(run_page("Load", ["note"], records, summary_of(records)))
    assert "no data" not in re.sub(r"<figcaption>TPOT.*?</figure>|<figcaption>ITL.*?</figure>", "", page)
    assert page.index("<table>") < page.index("<svg")  # the numbers come first
    assert ("not answered" in page) == any(record.outcome != "ok" for record in records)
    for term in ("TTFT", "TPOT", "ITL", "ICL", "E2E", "goodput"):
        assert f"<dt>{term}</dt>" in page
    assert len(page) < 600_000


def test_a_run_without_answers_shows_no_empty_charts() -> None:
    page = checked(run_page("Load", [], failed(30), summary_of(failed(30))))
    assert "no data" not in page
    assert "&lt;busy&gt;" in page
    assert not any("TTFT" in caption for caption in captions(page))
    assert "Requests a second" in captions(page)


def test_limits_of_the_slo_are_marked_where_they_are() -> None:
    page = run_page("Load", [], answered(40), summary_of(answered(40)))
    marked = [figure for figure in page.split("<figure>") if 'class="limit"' in figure]
    assert [captions(figure)[0].split(":")[0] for figure in marked] == ["TTFT", "TPOT"]


def test_what_the_server_tells_of_its_queue_is_a_chart() -> None:
    choice = {"queued_ms": 1.0, "first_scheduled_ms": 31.0, "first_token_ms": 40.0, "last_token_ms": 90.0}
    choice |= {"preemptions": 0, "completion_tokens": 2}
    records = answered(9, timings={"choices": [choice]})
    assert "Queue time on the server: share of requests at or below" in captions(
        checked(run_page("Load", [], records, summary_of(records)))
    )
    assert "Queue time" not in "".join(captions(run_page("Load", [], answered(9), summary_of(answered(9)))))


def test_a_void_run_says_so_above_everything() -> None:
    page = checked(run_page("Load", [], answered(40), summary_of(answered(40), lag=1.0)))
    assert 0 < page.index('class="void"') < page.index("<table>")


def probe(rate: float, share: float, void: bool = False) -> Probe:
    return Probe(rate, share, share - 0.1, min(1.0, share + 0.1), rate * share, 60, void)


def test_rates_at_which_the_client_was_the_limit_are_apart() -> None:
    probes = [probe(2.0, 1.0), probe(8.0, 0.2), probe(4.0, 0.9, void=True)]
    results = [found(probes, target) for target in TARGETS]
    page = checked(search_page("Load", [], probes, results, (answered(9), summary_of(answered(9)))))
    first = page.split("<figure>")[1]
    [line] = re.findall(r'class="line c0" d="M([^"]*)"', first)
    assert line.count("L") == 1  # from 2 to 8: what was void is on no line
    assert first.count("h0") == 3
    table = page.split("<table>")[2]
    assert re.findall(r"<td>(\d\.000) req/s(?: VOID)?</td><td>60", table) == ["2.000", "4.000", "8.000"]  # in order


@pytest.mark.parametrize("probes", [[], [probe(2.0, 0.0)], [probe(2.0, 0.5, void=True)]], ids=["none", "one", "void"])
def test_a_search_that_found_nothing_has_a_page(probes: list[Probe]) -> None:
    checked(search_page("Load", [], probes, [found(probes, target) for target in TARGETS], None))
