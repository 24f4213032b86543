"""The confirmation keeps what it has measured, whatever becomes of its further runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from scheduler_proc.event_log import EventLogError
from tools.loadgen.runner import RunError
from tools.loadgen.servers import ServerError
from tools.loadgen.sources import Request
from tools.tune import confirming
from tools.tune.confirming import Measurement, confirm, order_of

ARMS = [["--max-seqs=1"], ["--max-seqs=2"], ["--max-seqs=3"]]
REQUESTS = [Request(0.1 * number, 8, 4) for number in range(4)]
ROUNDS, SEED = 2, 1
NOT_STARTED = "the server did not start with: --max-seqs=2\nthe end of /x.log:\n  error: no memory\n"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> dict[str, BaseException]:
    """Stand-ins for all that would be started: the error that the second arm meets, by the part that raises it."""
    raised: dict[str, BaseException] = {}

    def meet(part: str, flags: tuple[str, ...]) -> None:
        if part in raised and "--max-seqs=2" in flags:
            raise raised[part]

    @asynccontextmanager
    async def server(model: str, *flags: str) -> AsyncIterator[tuple[str, ...]]:
        meet("server", flags)
        yield flags

    async def target_at(url: Any) -> Any:
        meet("target_at", url)
        return url

    async def send(schedule: object, target: Any, name: str) -> str:
        meet("send", target if name != "warm-up" else ())
        return name

    monkeypatch.setattr(confirming, "server", server)
    monkeypatch.setattr(confirming, "target_at", target_at)
    monkeypatch.setattr(confirming, "send", send)
    monkeypatch.setattr(confirming, "replay", lambda path: None)

    def add(self: Measurement, run: Any, warm_up: Any, log: Any) -> None:
        meet("add", ("--max-seqs=2",) if run == "arm-1" else ())
        self.servers.append((log, [warm_up, run]))

    monkeypatch.setattr(Measurement, "add", add)
    return raised


def measured() -> list[Measurement]:
    found = [Measurement() for _ in ARMS]
    work = confirm("model", ARMS, REQUESTS, found, rounds=ROUNDS, seed=SEED, say=lambda _: None)
    with suppress(KeyboardInterrupt):
        asyncio.run(work)
    return found


@pytest.mark.parametrize(
    ("part", "error", "reason"),
    [
        ("server", SystemExit(NOT_STARTED), "the server did not start with: --max-seqs=2: error: no memory"),
        ("server", OSError("no space left"), "no space left"),
        ("target_at", ServerError("no such model"), "no such model"),
        ("send", RunError("a worker process ended with status 1"), "a worker process ended with status 1"),
        ("add", EventLogError("it ends before its header does"), "it ends before its header does"),
    ],
    ids=["start", "disk", "protocol", "load generator", "log"],
)
def test_a_run_that_fails_is_one_of_its_arm(
    broken: dict[str, BaseException], part: str, error: BaseException, reason: str
) -> None:
    broken[part] = error
    found = measured()
    assert [len(measurement.servers) for measurement in found] == [ROUNDS, 0, ROUNDS]
    assert [measurement.lost for measurement in found] == [[], [reason] * ROUNDS, []]


def test_an_interrupt_leaves_what_was_measured_before_it(broken: dict[str, BaseException]) -> None:
    broken["send"] = KeyboardInterrupt()
    found = measured()
    before = order_of(len(ARMS), ROUNDS, SEED)
    before = before[: before.index(1)]
    assert [len(measurement.servers) for measurement in found] == [before.count(arm) for arm in range(len(ARMS))]
    assert not any(measurement.lost for measurement in found)
