"""What a search for the highest rate does and says, on servers that are functions of the rate."""

import asyncio
from collections.abc import Callable

import pytest

from tests.unit.tools.loadgen.test_summary import record
from tools.loadgen.lag import Limits, WorkerLoad
from tools.loadgen.messages import Record
from tools.loadgen.options import build_parser
from tools.loadgen.runner import Run, RunError
from tools.loadgen.schedule import Schedule
from tools.loadgen.search import Search, open_notes, search, short_notes
from tools.loadgen.session import Session, read_load
from tools.loadgen.summary import Summary, summarize

CALM, BUSY = (WorkerLoad([], 0.01, [(0.0, 1e4, share)]) for share in (0.1, 0.99))
Server = Callable[[float, int], tuple[list[Record] | None, WorkerLoad]]


def answered(number: int, ttft: float) -> list[Record]:
    return [record(index, float(index), [index + ttft]) for index in range(number)]


def mixed(number: int, share: float) -> list[Record]:
    """So many of them in time."""
    return [record(at, float(at), [at + (0.5 if at < share * number else 2.0)]) for at in range(number)]


def unreachable(number: int) -> list[Record]:
    detail = "ClientConnectorError: Connect call failed"
    return [record(at, float(at), [], outcome="connection", tokens=[], detail=detail) for at in range(number)]


class _Session(Session):
    """Asks `server` what came of so many requests at a rate; None: a worker process could not connect."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.rates: list[float] = []

    async def run(self, schedule: Schedule) -> tuple[Run, Summary]:
        number = len(schedule.items)
        rate = (number - 1) / schedule.items[-1].due
        self.rates.append(rate)
        records, worker = self._server(rate, number)
        if records is None:
            raise RunError("no engine there")
        given = build_parser().parse_args(["--slo", "ttft=1s"])
        summary = summarize(records, workers=[worker], limits=Limits(), slo=given.slo, added_tokens=0)
        return Run(schedule, records, [worker], 0.0, 0.0, interrupted=False), summary


def searched(server: Server, *flags: str) -> tuple[Search, list[float], list[str]]:
    """What was found, the rates that were run, and what the report says of short probes."""
    done, rates, _, notes = noted(server, *flags)
    return done, rates, notes


def noted(server: Server, *flags: str) -> tuple[Search, list[float], list[str], list[str]]:
    """The same, with what the report says of rates that are not known to the precision in the third place."""
    arguments = build_parser().parse_args(
        ["--find-rate", "--slo", "ttft=1s", "--arrivals", "fixed:8", "--probe-seconds", "10", *flags]
    )
    load, session = read_load(arguments), _Session(server)
    done = asyncio.run(search(arguments, load, session))
    return done, session.rates, open_notes(arguments, load, done), short_notes(arguments, load, done)


def test_the_capacity_is_found() -> None:
    done, rates, _ = searched(lambda rate, number: (answered(number, 0.5 if rate <= 20 else 2.0), CALM))
    assert rates[:3] == pytest.approx([8, 16, 32])
    for result in done.results:
        assert result.rate is not None
        assert result.missed_at is not None
        assert 20 / 1.1 <= result.rate <= 20 < result.missed_at <= result.rate * 1.1
    assert done.best is not None
    assert done.failure == ""


def test_what_is_not_known_to_the_precision_is_told() -> None:
    """90% are met up to 40 requests a second, 99% up to 20."""

    def server(rate: float, number: int) -> tuple[list[Record], WorkerLoad]:
        return mixed(number, 1.0 if rate <= 20 else 0.95 if rate <= 40 else 0.5), CALM

    _, _, notes, _ = noted(server, "--probes", "1")
    assert notes == [
        f"the highest rate with {target} within the SLO is 8.000 requests/s or more; no rate that was tried missed it: "
        "--probes 1 are spent"
        for target in ("90%", "99%")
    ]
    _, rates, notes, _ = noted(server, "--probes", "4")
    assert rates == pytest.approx([8, 16, 32, 64])
    assert notes == [
        f"the highest rate with {target} within the SLO lies between {between} requests/s, known to 100.0% and not to "
        "the 10.0% of --precision: --probes 4 are spent"
        for target, between in (("90%", "32.000 and 64.000"), ("99%", "16.000 and 32.000"))
    ]


def test_what_is_known_to_the_precision_needs_no_note() -> None:
    _, _, notes, _ = noted(lambda rate, number: (answered(number, 0.5 if rate <= 20 else 2.0), CALM))
    assert notes == []


def test_rates_that_all_missed_are_told_with_the_lowest() -> None:
    _, _, notes, _ = noted(lambda rate, number: (answered(number, 2.0), CALM), "--probes", "2")
    assert notes == [
        f"the highest rate with {target} within the SLO lies below 4.000 requests/s; no rate that was tried met it: "
        "--probes 2 are spent"
        for target in ("90%", "99%")
    ]


def test_the_best_run_is_none_that_a_miss_below_has_taken_away() -> None:
    """The search for 99% goes below the 16 that 90% had found, and there the server misses 90% too."""

    def server(rate: float, number: int) -> tuple[list[Record], WorkerLoad]:
        return mixed(number, 1.0 if rate < 8.1 else 0.95 if 15 < rate < 16.5 else 0.5), CALM

    done, rates, _, _ = noted(server)
    assert rates[:8] == pytest.approx([8, 16, 32, 24, 20, 18, 17, 12])
    assert done.results[0].rate == pytest.approx(8)
    assert done.best is not None
    run, summary = done.best
    assert len(run.schedule.items) == 80
    assert summary.goodput is not None
    assert summary.goodput.share == 1.0


@pytest.mark.parametrize("lost", ["no connection", "no worker"])
def test_it_stops_when_the_server_is_gone(lost: str) -> None:
    """The probes until then count; nothing is a miss that no server has seen."""

    def server(rate: float, number: int) -> tuple[list[Record] | None, WorkerLoad]:
        if rate <= 20:
            return answered(number, 0.5), CALM
        return (unreachable(number), CALM) if lost == "no connection" else (None, CALM)

    done, rates, _ = searched(server)
    assert rates == pytest.approx([8, 16, 32])
    assert [probe.rate for probe in done.probes] == pytest.approx([8, 16])
    assert done.results[0].missed_at is None
    expected = (
        "the server is gone: all 200 connections for requests at 32.000 requests/s failed: ClientConnectorError: "
    )
    assert done.failure.startswith(expected if lost == "no connection" else "no engine there")
    assert "missed may be its end" not in done.failure


def test_a_miss_just_before_the_server_was_gone_is_suspected() -> None:
    done, _, _ = searched(
        lambda rate, number: (unreachable(number) if rate == pytest.approx(4) else answered(number, 2.0), CALM)
    )
    assert [probe.rate for probe in done.probes] == pytest.approx([8])
    assert done.failure.endswith("what the probe at 8.000 requests/s missed may be its end")


def test_a_server_that_was_never_there_is_told_after_one_probe() -> None:
    done, rates, _ = searched(lambda rate, number: (unreachable(number), BUSY))
    assert len(rates) == 1
    assert done.probes == []
    assert "the server is gone" in done.failure
    with pytest.raises(RunError):
        searched(lambda rate, number: (None, CALM))


def test_some_failed_connections_are_misses_as_other_failures_are() -> None:
    def server(rate: float, number: int) -> tuple[list[Record], WorkerLoad]:
        return [*answered(number, 0.5)[:1], *unreachable(number)[1:]] if rate > 20 else answered(number, 0.5), CALM

    done, _, _ = searched(server)
    assert done.failure == ""
    assert done.results[0].rate == pytest.approx(20, rel=0.1)


def test_a_void_probe_is_run_again_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[float] = []

    def server(rate: float, number: int) -> tuple[list[Record], WorkerLoad]:
        calls.append(rate)
        return answered(number, 0.5), BUSY if len(calls) == 2 else CALM

    done, rates, _ = searched(server, "--probes", "3")
    assert rates == pytest.approx([8, 16, 16, 32])
    assert [probe.void for probe in done.probes] == [False] * 3
    expected = "the probe at 16.000 requests/s is void and is run again: a worker process used 99% of a core"
    assert capsys.readouterr().err.count(expected) == 1


def test_probes_that_are_shorter_than_they_should_be_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """200 requests are 10 s at 20 a second."""
    done, rates, notes = searched(lambda rate, number: (answered(number, 0.5), CALM), "--probes", "4")
    assert rates == pytest.approx([8, 16, 32, 64])
    assert [probe.rate for probe in done.short] == pytest.approx([32, 64])
    err = capsys.readouterr().err
    assert "at 32.000 requests/s all 200 requests come within 6.2 s: this probe is shorter than the 10 s" in err
    assert "at 16.000" not in err
    [note] = notes
    assert note.startswith("2 of 4 probes, from 32.000 requests/s on, lasted less than the 10 s of --probe-seconds")
    _, _, none = searched(lambda rate, number: (answered(number, 0.5), CALM), "--probes", "2")
    assert none == []
