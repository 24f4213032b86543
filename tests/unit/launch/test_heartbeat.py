"""Which processes count as hanging, on a clock of the test's."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.control import Ping
from launch.fleet import Fleet
from launch.heartbeat import Heartbeats

TIMEOUT = 8.0


def process(role: str = "tokenizer", **state: Any) -> Any:
    made = SimpleNamespace(role=role, ready=True, alive=True, told_to_end=False, hang=None, pinged=None, pings=0)

    def order(message: object) -> None:
        assert message == Ping()
        made.pings += 1

    made.order = order
    vars(made).update(state)
    return made


def heartbeats(*processes: Any) -> Heartbeats:
    return Heartbeats(cast(Fleet, SimpleNamespace(processes=list(processes))), TIMEOUT)


def run(beats: Heartbeats, until: float, begin: float = 0.0) -> tuple[float, list[Any]]:
    """Look whenever it is time; when somebody was found, and whom."""
    now = begin
    while now <= until:
        if hanging := beats.look(now):
            return now, hanging
        now = beats.deadline
    return now, []


@pytest.mark.parametrize(("role", "seconds"), [("tokenizer", 8), ("scheduler", 8), ("frontend", 8), ("worker", 16)])
def test_a_silent_process_is_found_after_the_timeout_and_once(role: str, seconds: float) -> None:
    silent, other = process(role), process()
    beats = heartbeats(silent, other)
    found: list[Any] = []
    now = 0.0
    while now < 40:
        found += [(now, hanging) for hanging in beats.look(now)]
        other.pinged = None
        now = beats.deadline
    assert found == [(seconds, silent)]
    assert silent.hang == f"no sign of life for {seconds} s"
    assert silent.pings == 1, "none more is sent, so that its pipe never fills"
    assert other.pings > 10


@pytest.mark.parametrize("state", [{"ready": False}, {"alive": False}, {"told_to_end": True}, {"hang": "known"}])
def test_who_loads_or_ends_is_not_asked(state: dict[str, Any]) -> None:
    silent = process(**state)
    assert run(heartbeats(silent), 100)[1] == []
    assert silent.pings == 0


@given(st.floats(1.01, 1e6))
def test_a_look_that_comes_late_gives_everybody_time_again(pause: float) -> None:
    silent = process()
    beats = heartbeats(silent)
    run(beats, 7)
    late = beats.deadline + pause
    assert not beats.look(late)
    found, hanging = run(beats, late + 100, begin=beats.deadline)
    assert hanging == [silent]
    assert TIMEOUT - 0.01 <= found - late <= TIMEOUT + 2.01, "a look comes every 2 s"


def test_looks_between_the_times_cost_nothing() -> None:
    asked = process()
    beats = heartbeats(asked)
    beats.look(0.0)
    asked.pinged = None
    beats.look(1.0)  # something else has woken the launcher
    assert asked.pings == 1
