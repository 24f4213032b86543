"""When the scheduler is asked for diagnoses, and for how long."""

import asyncio

import pytest

from frontend import diagnosis
from frontend.diagnosis import Diagnoses
from frontend.errors import ApiError
from ipc.stats_messages import Diagnosis

FOUND = Diagnosis(0.0, 30.0, 1, 1, (), (), "nothing")


def test_one_diagnosis_is_made_for_all_who_want_it_at_once() -> None:
    asked: list[bool] = []

    async def run() -> None:
        diagnoses = Diagnoses(asked.append)
        waiting = [asyncio.create_task(diagnoses.newest()) for _ in range(3)]
        await asyncio.sleep(0)
        assert asked == [True]
        waiting[0].cancel()  # the others still want it
        await asyncio.sleep(0)
        assert asked == [True]
        diagnoses.take(FOUND)
        assert await asyncio.gather(*waiting[1:]) == [FOUND, FOUND]
        assert asked == [True, False]
        assert await diagnoses.newest() is FOUND  # it is fresh
        assert asked == [True, False]

    asyncio.run(run())


def test_an_old_one_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(diagnosis, "_PATIENCE_SECONDS", 0.05)
    asked: list[bool] = []

    async def run() -> None:
        diagnoses = Diagnoses(asked.append)
        diagnoses.take(FOUND)
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as error:
            await diagnoses.newest()
        assert error.value.status == 503
        assert asked == [True, False]

    asyncio.run(run())
