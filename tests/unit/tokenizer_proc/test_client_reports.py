"""Which reports of clients are kept."""

import math

import pytest

from ipc.messages import ClientReport
from tokenizer_proc.client_reports import MAX_CLIENTS, ClientReports


def test_the_newest_of_each_client_until_it_is_gone() -> None:
    reports = ClientReports()
    first, second, other = (ClientReport(name, cpu, 1, 0.1) for name, cpu in (("a", 1.0), ("a", 2.0), ("b", 3.0)))
    for peer, report in ((b"1", first), (b"2", other), (b"1", second)):
        reports.take(peer, report)
    assert set(reports.newest) == {second, other}
    reports.forget(b"1")
    reports.forget(b"never seen")
    assert reports.newest == (other,)


@pytest.mark.parametrize(
    "report",
    [
        ClientReport("x" * 65, 1.0, 1, 0.1),
        ClientReport("a", -1.0, 1, 0.1),
        ClientReport("a", math.nan, 1, 0.1),
        ClientReport("a", 1.0, 1, math.inf),
        ClientReport("a", 1.0, 1 << 62, 0.1),
        ClientReport("a", 1.0, 1, 0.1, slow=-1),
    ],
)
def test_what_makes_no_sense_is_dropped(report: ClientReport) -> None:
    reports = ClientReports()
    reports.take(b"1", report)
    assert reports.newest == ()


def test_their_number_is_bounded() -> None:
    reports = ClientReports()
    for number in range(MAX_CLIENTS + 5):
        reports.take(b"%d" % number, ClientReport("a", 1.0, 1, 0.1))
    assert len(reports.newest) == MAX_CLIENTS
