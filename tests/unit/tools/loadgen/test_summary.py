"""Latencies of records by hand, and what of them makes the report."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.loadgen.lag import Limits, WorkerLoad
from tools.loadgen.latencies import latencies_of, server_latencies
from tools.loadgen.messages import Record
from tools.loadgen.report import text_report
from tools.loadgen.slo import Slo, parse_slo
from tools.loadgen.summary import Summary, summarize


def record(index: int, scheduled: float, times: list[float], **fields: Any) -> Record:
    given: dict[str, Any] = {
        "id": f"r{index}", "index": index, "worker": 0, "scheduled": scheduled, "sent": scheduled, "outcome": "ok",
        "ended": times[-1] if times else scheduled + 1, "times": times, "tokens": [1] * len(times),
        "completion_tokens": len(times),
    }  # fmt: skip
    return Record(**given | fields)


def summary_of(records: list[Record], slo: Slo | None = None) -> Summary:
    return summarize(records, workers=[], limits=Limits(), slo=slo, added_tokens=0)


def test_latencies_by_hand() -> None:
    found = latencies_of(record(0, 10.0, [10.5, 10.7, 11.3], tokens=[1, 2, 3], completion_tokens=6))
    assert found.ttft == pytest.approx(0.5)
    assert found.e2e == pytest.approx(1.3)
    assert found.tpot == pytest.approx(0.8 / 5)
    assert found.icl.tolist() == pytest.approx([0.2, 0.6])
    assert found.itl.tolist() == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.2])
    assert found.worst_itl == pytest.approx(0.2)
    single = latencies_of(record(0, 0.0, [0.5]))
    assert (single.tpot, single.worst_itl, single.tokens) == (None, None, 1)
    untold = latencies_of(record(0, 0.0, [0.5, 0.6], tokens=[], completion_tokens=None))
    assert (untold.tpot, untold.tokens, len(untold.itl), len(untold.icl)) == (None, None, 0, 1)


def test_the_worst_itl_is_that_of_99_percent() -> None:
    gaps = np.full(200, 0.01)
    gaps[[5, 100]] = 1.0
    assert latencies_of(record(0, 0.0, [0.0, *np.cumsum(gaps).tolist()])).worst_itl == pytest.approx(0.01)
    gaps[7] = 1.0
    assert latencies_of(record(0, 0.0, [0.0, *np.cumsum(gaps).tolist()])).worst_itl == pytest.approx(1.0)


def test_what_the_server_does_not_tell_is_a_miss() -> None:
    """It may be anything; only of what there is none, nothing can be missed."""
    bundled = record(0, 0.0, [0.5, 0.6], tokens=[], completion_tokens=8)
    untold = record(1, 0.0, [0.5, 0.6], tokens=[], completion_tokens=None)
    single = record(2, 0.0, [0.5])
    at_once = record(3, 0.0, [0.5], tokens=[3], completion_tokens=3)
    for slo, met, unknown in ((Slo(itl=9.0), 2, 2), (Slo(tpot=9.0), 3, 1), (Slo(ttft=9.0, e2e=9.0), 4, 0)):
        found = summary_of([bundled, untold, single, at_once], slo)
        assert found.goodput is not None
        assert (found.goodput.met, found.goodput.unknown) == (met, unknown)
        assert ("the server does not tell its tokens" in text_report("run", found)) is bool(unknown)


CHUNKS = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 9)), min_size=1, max_size=40)


def chunked(index: int, chunks: list[tuple[int, int]]) -> Record:
    """Of (milliseconds after the one before it, its tokens); due at 0."""
    times = (np.cumsum([gap for gap, _ in chunks]) / 1e3).tolist()
    tokens = [number for _, number in chunks]
    return record(index, 0.0, times, tokens=tokens, completion_tokens=sum(tokens))


@given(chunks=CHUNKS)
def test_a_gap_is_shared_by_the_tokens_that_it_brought(chunks: list[tuple[int, int]]) -> None:
    found = latencies_of(chunked(0, chunks))
    assert found.itl.tolist() == pytest.approx(
        [gap / number / 1e3 for gap, number in chunks[1:] for _ in range(number)]
    )
    span = sum(gap for gap, _ in chunks[1:]) / 1e3
    assert float(found.itl.sum()) == pytest.approx(span)
    assert float(found.icl.sum()) == pytest.approx(span)
    tokens = sum(number for _, number in chunks)
    assert found.tpot == (None if tokens == 1 else pytest.approx(span / (tokens - 1)))
    assert found.e2e == pytest.approx(found.ttft + span)


@given(gaps=st.lists(st.integers(1, 500), min_size=1, max_size=450))
def test_the_worst_itl_is_the_least_that_99_percent_are_within(gaps: list[int]) -> None:
    found = latencies_of(chunked(0, [(5, 1), *((gap, 1) for gap in gaps)]))
    expected = np.percentile(np.array(gaps) / 1e3, 99, method="inverted_cdf")
    assert found.worst_itl == pytest.approx(expected)
    assert found.worst_itl is not None
    within = sum(gap <= found.worst_itl + 1e-9 for gap in found.itl)
    assert 100 * within >= 99 * len(gaps)


@given(requests=st.lists(CHUNKS, min_size=1, max_size=12))
def test_itl_percentiles_are_of_all_tokens_and_tpot_ones_of_all_requests(
    requests: list[list[tuple[int, int]]],
) -> None:
    found = summary_of([chunked(index, chunks) for index, chunks in enumerate(requests)])
    gaps = [gap / number / 1e3 for chunks in requests for gap, number in chunks[1:] for _ in range(number)]
    assert found.itl.n == len(gaps)
    assert found.icl.n == sum(len(chunks) - 1 for chunks in requests)
    assert found.tpot.n == sum(sum(number for _, number in chunks) > 1 for chunks in requests)
    assert found.output_tokens == sum(number for chunks in requests for _, number in chunks)
    for percent, estimate in ((50, found.itl.p50), (90, found.itl.p90), (99, found.itl.p99)):
        if len(gaps) * (100 - percent) < 100:
            assert estimate is None
            continue
        assert estimate is not None
        assert estimate.value == pytest.approx(np.percentile(gaps, percent))
        assert estimate.low is not None
        assert estimate.high is not None
        assert min(gaps) - 1e-9 <= estimate.low <= estimate.high <= max(gaps) + 1e-9


OUTCOMES = st.sampled_from(
    ["ok", "ok", "ok", "refused", "http", "connection", "truncated", "empty", "timeout", "cancelled"]
)


@given(
    requests=st.lists(st.tuples(OUTCOMES, st.integers(1, 40), st.integers(1, 40), st.booleans()), max_size=40),
)
def test_goodput_is_what_counting_by_hand_says(requests: list[tuple[str, int, int, bool]]) -> None:
    """TTFT and then three equal gaps, in hundredths of a second; one request a second. What equals a limit meets it."""
    slo = Slo(ttft=0.2 + 1e-9, tpot=0.1 + 1e-9)  # but for rounding
    records, met = [], 0
    for at, (outcome, ttft, gap, measured) in enumerate(requests):
        times = [at + ttft / 100 + part * gap / 100 for part in range(4)] if outcome == "ok" else []
        records.append(record(at, float(at), times, outcome=outcome, measured=measured, tokens=[1] * len(times)))
        if measured and outcome != "cancelled":
            met += outcome == "ok" and ttft <= 20 and gap <= 10
    due = [at for at, (outcome, _, _, measured) in enumerate(requests) if measured and outcome != "cancelled"]
    found = summary_of(records, slo).goodput
    assert found is not None
    assert found.met == met
    assert found.share == pytest.approx(met / len(due) if due else 0.0)
    assert 0 <= found.share_low <= found.share <= found.share_high <= 1
    if len(due) > 1:
        assert found.rate == pytest.approx(met / len(due) * (len(due) - 1) / (due[-1] - due[0]))


def test_goodput_counts_failures_as_misses_and_the_cancelled_not_at_all() -> None:
    records = [record(at, float(at), [at + 0.1, at + 0.2]) for at in range(8)]
    records[3] = record(3, 3.0, [3.9, 4.0])  # late
    records[4] = record(4, 4.0, [], outcome="refused", status=429, tokens=[])
    records[5] = record(5, 5.0, [5.05], outcome="truncated")
    records[7] = record(7, 7.0, [], outcome="cancelled")
    records[0].measured = False
    found = summary_of(records, Slo(ttft=0.5))
    assert found.measured == 6
    assert found.outcomes == {"ok": 4, "refused": 1, "truncated": 1}
    assert found.offered_rate == pytest.approx(1.0)
    assert found.goodput is not None
    assert found.goodput.met == 3
    assert found.goodput.share == pytest.approx(0.5)
    assert found.goodput.rate == pytest.approx(0.5)
    assert [failure.id for failure in found.failures] == ["r4", "r5"]
    assert found.ttft.n == 4
    assert found.output_tokens == 8
    assert found.seconds == pytest.approx(6.2 - 1.0)


@pytest.mark.parametrize("outcome", ["timeout", "truncated", "error", "connection", "empty"])
@pytest.mark.parametrize("due", ["spread", "at once"])
@pytest.mark.parametrize("hung", [0, 3, 9])
def test_what_fails_late_changes_no_rate(outcome: str, due: str, hung: int) -> None:
    """As one that hangs until `--timeout` does: it has no tokens, and its end is not in the time that others took."""
    slo = Slo(ttft=1.0)
    good = [record(at, float(at) if due == "spread" else 0.0, [at + 0.5, at + 0.6]) for at in range(10)]
    early, late = list(good), list(good)
    for at, ended in ((early, good[hung].scheduled), (late, good[hung].scheduled + 600.0)):
        at[hung] = record(hung, good[hung].scheduled, [], outcome=outcome, tokens=[], ended=ended)
    first, second = summary_of(early, slo), summary_of(late, slo)
    assert first.goodput is not None
    assert second.goodput is not None
    for name in ("seconds", "output_tokens", "output_throughput", "prompt_throughput", "offered_rate"):
        assert getattr(first, name) == getattr(second, name)
    assert first.goodput.rate == second.goodput.rate
    last = 9.6 if hung != 9 else 9.0 if due == "spread" else 8.6
    assert second.seconds == pytest.approx(last)
    assert second.output_throughput == pytest.approx(18 / last)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_request_that_hangs_does_not_hide_a_busy_client(hangs: bool) -> None:
    """95% of a core for 60 s; one request then hangs for 600 s."""
    cpu = [(at / 2, (at + 1) / 2, 0.95 if at < 120 else 0.01) for at in range(1320)]
    ticks = [(at * 0.11, 0.1 if at * 0.11 < 60 else 0.0) for at in range(6000)]
    records = [record(at, float(at), [at + 0.5, at + 3.0]) for at in range(57)]
    if hangs:
        records.append(record(57, 57.0, [], outcome="timeout", tokens=[], ended=657.0))
    worker = WorkerLoad(ticks, 0.01, cpu)
    found = summarize(records, workers=[worker], limits=Limits(), slo=None, added_tokens=0).client
    assert found.cpu == pytest.approx([0.95])
    assert len(found.void) == 2


def test_percentiles_need_enough_values() -> None:
    found = summary_of([record(at, 0.0, [0.1 * (at + 1), 10.0]) for at in range(10)])
    assert found.ttft.p50 is not None
    assert (found.ttft.p50.low, found.ttft.p50.high) == pytest.approx((0.2, 0.9))
    assert found.ttft.p90 is not None
    assert found.ttft.p90.high is None
    assert found.ttft.p99 is None


def test_nothing_at_all_can_be_summed_up_and_shown() -> None:
    found = summary_of([], Slo(ttft=1.0))
    assert found.goodput is not None
    assert found.goodput.share == 0.0
    assert "requests sent / measured" in text_report("run", found)


def timings(**fields: Any) -> dict[str, Any]:
    choice = {"queued_ms": 1.0, "first_scheduled_ms": 4.0, "first_token_ms": 100.0, "last_token_ms": 400.0}
    return {"choices": [choice | {"completion_tokens": 4, "preemptions": 2} | fields]}


def test_the_servers_timeline_by_hand() -> None:
    found = server_latencies(timings())
    assert found is not None
    assert (found.ttft, found.tpot, found.queue) == pytest.approx((0.1, 0.1, 0.003))
    assert found.preemptions == 2
    none = server_latencies(timings(first_token_ms=None, first_scheduled_ms=None))
    assert none is not None
    assert (none.ttft, none.tpot, none.queue) == (None, None, None)
    for other in ({}, {"choices": []}, {"choices": [{}]}, {"choices": 5}, timings(first_token_ms="x")):
        assert server_latencies(other) is None


def test_agreement_is_within_2_ms_or_2_percent() -> None:
    def joined(index: int, late: float) -> Record:
        """Client and server differ by `late` in TTFT."""
        first = index + 0.1 + late
        times = [first, first + 0.1, first + 0.2, first + 0.3]
        return record(index, index - 5.0, times, sent=float(index), timings=timings())

    found = summary_of([joined(0, 0.0), joined(1, 0.0019), joined(2, -0.0021), joined(3, 0.01)]).agreement
    assert found is not None
    assert (found.joined, found.preemptions) == (4, 8)
    assert found.ttft is not None
    assert found.ttft.agree == 2
    assert found.ttft.largest == pytest.approx(0.01)
    assert found.tpot is not None
    assert found.tpot.agree == 4
    large = summary_of([record(0, 0.0, [1.019], sent=0.0, timings=timings(first_token_ms=1000.0))]).agreement
    assert large is not None
    assert large.ttft is not None
    assert large.ttft.agree == 1  # 19 ms of 1 s


def test_ttft_is_compared_with_when_the_server_had_the_first_to_show() -> None:
    """Between the scheduler's first token and the network there are two more processes."""
    told = timings(first_token_ms=100.0) | {"first_output_ms": 103.0}
    found = summary_of([record(0, 0.0, [0.1035], sent=0.0, timings=told)]).agreement
    assert found is not None
    assert found.ttft is not None
    assert found.ttft.p50 == pytest.approx(0.0005)
    silent = summary_of([record(0, 0.0, [0.1035], sent=0.0, timings=told | {"first_output_ms": None})]).agreement
    assert silent is not None
    assert silent.ttft is not None
    assert silent.ttft.p50 == pytest.approx(0.0035)


def test_ttft_is_compared_from_when_the_request_was_the_systems() -> None:
    """What came before, connecting included, is in the client's own TTFT and no time of the server's."""
    found = summary_of([record(0, 0.0, [0.15], sent=0.01, written=0.05, timings=timings(first_token_ms=100.0))])
    assert found.agreement is not None
    assert found.agreement.ttft is not None
    assert found.agreement.ttft.p50 == pytest.approx(0.0, abs=1e-9)
    assert found.ttft is not None
    assert found.ttft.mean == pytest.approx(0.15)


def test_exactness_says_by_how_much() -> None:
    records = [
        record(at, 0.0, [0.1], input_length=10, prompt_tokens=10 + extra, output_length=1)
        for at, extra in enumerate((0, 0, 2, -1, 2))
    ]
    found = summary_of(records).prompt_exact
    assert (found.compared, found.exact, found.differences) == (5, 2, {-1: 1, 2: 2})


def test_slo_limits_are_read() -> None:
    assert parse_slo("ttft=500ms,itl=0.05s") == Slo(ttft=0.5, itl=0.05)
    for text in ("", "ttft", "ttft=5", "ttft=-1s", "ttft=xs", "icl=5ms", "ttft=1s,ttft=2s"):
        with pytest.raises(ValueError, match="must be limits such as"):
            parse_slo(text)
