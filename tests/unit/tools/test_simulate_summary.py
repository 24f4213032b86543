"""The numbers of the table, against numpy and by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.codec import pack_int64s, pack_ints
from ipc.engine_messages import NewRow, RowOutput, SamplingSpec, StepOutputs, StepPlan
from ipc.messages import Failed
from scheduler_proc.events import SendOutputs, SendPlan
from tools.reports.percentiles import percentile
from tools.reports.table import render, seconds
from tools.simulate.observer import Arriving, Observer, Sample, Status, means
from tools.simulate.summary import PERCENTILES, Slo, Spread, latencies_of

PEER = b"t"


@given(values=st.lists(st.floats(0, 1e6), max_size=300), percent=st.sampled_from(PERCENTILES))
def test_percentiles_are_numpys_where_n_supports_them(values: list[float], percent: int) -> None:
    found = percentile(np.array(values), percent)
    needed = {50: 2, 90: 10, 99: 100}[percent]
    if len(values) < needed:
        assert found is None
    else:
        assert found == np.quantile(values, percent / 100)


def outputs(plain: list[int], *rows: RowOutput | Failed) -> SendOutputs:
    return SendOutputs(PEER, StepOutputs(rows, pack_int64s(plain), pack_ints([5] * len(plain))))


def row(request_id: int, tokens: int, finish: str | None = None) -> RowOutput:
    assert finish in (None, "stop", "length")
    return RowOutput(request_id, pack_ints([5] * tokens), finish)  # type: ignore[arg-type]


def new(row: int, number: int) -> NewRow:
    return NewRow(row, pack_ints([1]), 1, b"", SamplingSpec(seed=number))


def observed() -> Observer:
    """Ids 70 to 73 are the requests 0 to 3. 0: 3 tokens; 1: 1 token, late; 2: refused; 3: 4 tokens, two at once."""
    observer = Observer(4)
    for number, time in enumerate((1.0, 1.5, 1.5, 2.0)):
        refusal = [outputs([], Failed(72, 429, "full", "rate_limit_error"))] if number == 2 else []
        observer.see(time, refusal, Arriving(number, PEER, 70 + number, time))
    observer.see(1.1, [SendPlan(StepPlan(0, (new(0, 0),), b"", b"", pack_ints([0, 0, 1, 1])))])
    observer.see(2.5, [SendPlan(StepPlan(1, (new(1, 1), new(2, 3)), b"", b"", b""))])
    observer.see(2.0, [outputs([70])])
    observer.see(2.4, [outputs([70, 73])])
    observer.see(3.0, [outputs([], row(70, 1, "stop"), row(73, 2))])
    observer.see(6.0, [outputs([], row(71, 1, "length"), row(73, 1, "length"))])
    return observer


def test_latencies_by_hand() -> None:
    observer = observed()
    assert observer.status.tolist() == [Status.FINISHED, Status.FINISHED, Status.REFUSED, Status.FINISHED]
    assert observer.num_tokens.tolist() == [3, 1, 0, 4]
    assert sorted(observer.gaps.tolist()) == pytest.approx(sorted([0.4, 0.6, 0.3, 0.3, 3.0]))
    # TTFT 1.0, 4.5, -, 0.4; TPOT 0.5, -, -, 1.2
    found = latencies_of(observer, Slo(ttft=1.0, tpot=0.6))
    assert (found.requests, found.finished, found.refused, found.failed) == (4, 3, 1, 0)
    assert found.seconds == pytest.approx(5.0)
    assert found.ttft.p50 == pytest.approx(1.0)
    assert found.tpot == Spread(2, pytest.approx(0.85), None, None)
    assert found.queue.p50 == pytest.approx(0.5)  # 0.1, 1.0, 0.5
    assert found.e2e.p50 == pytest.approx(4.0)  # 2.0, 4.5, 4.0
    assert found.output_tokens == 8
    assert found.output_throughput == pytest.approx(8 / 5.0)
    assert (found.met_slo, found.goodput) == (1, pytest.approx(0.2))
    assert latencies_of(observer, Slo(ttft=0.4 + 1e-9, tpot=2.0)).met_slo == 1
    assert latencies_of(observer, Slo(ttft=10.0, tpot=2.0)).met_slo == 3  # one token has no TPOT to miss


def test_a_refused_duplicate_leaves_the_older_request_alone() -> None:
    observer = Observer(2)
    observer.see(0.0, [], Arriving(0, PEER, 9, 0.0))
    observer.see(1.0, [outputs([], Failed(9, 400, "in use", "invalid_request_error"))], Arriving(1, PEER, 9, 1.0))
    observer.see(2.0, [outputs([], row(9, 1, "stop"))])
    assert observer.status.tolist() == [Status.FINISHED, Status.REFUSED]
    assert observer.num_tokens.tolist() == [1, 0]


def test_aborted_requests_are_neither_met_nor_missed() -> None:
    observer = Observer(2)
    for number in (0, 1):
        observer.see(0.0, [], Arriving(number, PEER, number, 0.0))
    observer.see(0.5, [outputs([], row(0, 1, "stop"))])
    observer.abort_all(PEER)
    found = latencies_of(observer, Slo(1.0, 1.0))
    assert (found.finished, found.aborted, found.met_slo) == (1, 1, 1)


def test_means_over_time_weigh_by_duration() -> None:
    samples = [Sample(1.0, 4, 0, 0.5), Sample(3.0, 0, 0, 0.0), Sample(3.5, 2, 0, 1.0)]
    assert means(samples, "running", 4.0, 2).tolist() == pytest.approx([(0 + 4) / 2, (4 + 0 * 0.5 + 2 * 0.5) / 2])
    assert means(samples, "kv_share", 4.0, 1).tolist() == pytest.approx([(0.5 * 2 + 1.0 * 0.5) / 4])


def test_a_table_is_aligned() -> None:
    text = render(["a", "long name"], [("x", ["1", "2"]), ("metric", ["10 s", "-"])])
    assert text == "           a  long name\nx          1          2\nmetric  10 s          -"


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.0123, "12.3 ms"), (1.5, "1.50 s"), (12345.6, "12,346 s")])
def test_times_have_fitting_units(value: float | None, text: str) -> None:
    assert seconds(value) == text
