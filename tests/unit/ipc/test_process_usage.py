"""What a process measures of itself."""

import asyncio
import time
from statistics import fmean
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import process_usage
from ipc.process_usage import UsageMeter, watch_loop
from ipc.stats_messages import LAG_BOUNDS


@given(st.lists(st.floats(0, 10)))
def test_every_lag_is_in_the_first_bucket_that_is_not_below_it(lags: list[float]) -> None:
    meter = UsageMeter("x")
    for lag in lags:
        meter.add_lag(lag)
    usage = meter.usage()
    expected = [sum(lag <= bound for lag in lags) for bound in (*LAG_BOUNDS, float("inf"))]
    cumulative = [sum(usage.lags[: index + 1]) for index in range(len(usage.lags))]
    assert cumulative == (expected if lags else [])
    assert usage.lag_seconds == sum(lags)


def test_a_process_without_a_loop_tells_its_cpu_time_only() -> None:
    before = time.process_time()
    usage = UsageMeter("worker-3").usage()
    assert (usage.name, usage.lags) == ("worker-3", ())
    assert before <= usage.cpu_seconds <= time.process_time()


def test_a_loop_that_is_kept_busy_is_late() -> None:
    async def run() -> list[float]:
        lags: list[float] = []
        watching = asyncio.create_task(watch_loop(lags.append))
        await asyncio.sleep(0.02)
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            pass
        while not lags:
            await asyncio.sleep(0.01)
        watching.cancel()
        return lags

    assert asyncio.run(run())[0] >= 0.27  # the first look was due within 0.15 s


def test_stops_at_equal_intervals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU limit lets a process run for the first 20 ms of each 100 ms: it is late by 80/100 of 40 ms on average."""
    now = 0.0
    lags: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        if len(lags) == 2000:
            raise asyncio.CancelledError
        now += seconds
        if now % 0.1 > 0.02:
            now += 0.1 - now % 0.1

    monkeypatch.setattr(process_usage, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(process_usage, "time", SimpleNamespace(monotonic=lambda: now))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch_loop(lags.append))
    assert fmean(lags) == pytest.approx(0.032, rel=0.15)
