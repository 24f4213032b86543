"""Processes that are asked in JSON lines: what is lost with one is told, and everything else is answered."""

import os
import time
from collections.abc import Iterator, Sequence

import pytest

from tools.gpu_kernels.workers import LostError, Request, Result, Worker, ask_all

MODULE = "tests.unit.tools.echo_worker"


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    started = [Worker(MODULE, {**os.environ, "ECHOED": "given"}) for _ in range(2)]
    yield started
    for worker in started:
        worker.close()


def requests(*units: Sequence[str]) -> list[Request]:
    return [{"units": list(each)} for each in units]


def texts(results: Sequence[Result]) -> dict[str, str]:
    """By unit: what it was answered, or how it was lost."""
    return {result.unit: result.answer["unit"] if result.answer else f"lost: {result.lost}" for result in results}


def test_every_unit_is_answered_by_one_of_the_processes(workers: list[Worker]) -> None:
    results = list(ask_all(workers, requests("ab", "cd", "ef"), 30))
    assert texts(results) == {letter: letter for letter in "abcdef"}
    assert {result.answer["variable"] for result in results if result.answer} == {"given"}
    assert len({result.answer["process"] for result in results if result.answer}) <= 2


@pytest.mark.parametrize(
    ("unit", "said"),
    [("die", "its process ended with 1: this is no answer what it said last"), ("abort", "ended by signal 6")],
)
def test_what_follows_a_unit_that_ends_the_process_is_answered_by_a_new_one(
    workers: list[Worker], unit: str, said: str
) -> None:
    results = list(ask_all(workers[:1], requests([unit, "b", unit + "d", "c"]), 30))
    found = texts(results)
    assert said in found.pop(unit)
    assert found == {"b": "b", unit + "d": unit + "d", "c": "c"}


def test_a_unit_that_takes_too_long_is_lost(workers: list[Worker]) -> None:
    list(ask_all(workers[:1], requests("a"), 30))  # has it started
    found = texts(list(ask_all(workers[:1], requests(["hang"]), 0.3)))
    assert found == {"hang": "lost: took more than 0.3 s"}
    assert texts(list(ask_all(workers[:1], requests("b"), 30))) == {"b": "b"}


def test_what_has_not_begun_in_time_is_left_out(workers: list[Worker]) -> None:
    assert list(ask_all(workers, requests("a", "b"), 30, until=time.monotonic())) == []


def test_units_for_which_there_is_no_time_are_left_out(workers: list[Worker]) -> None:
    list(ask_all(workers[:1], requests("a"), 30))  # has it started
    until = time.monotonic() + 2
    asked = [{"units": ["a", "late", "c"], "late_at": until + 0.1}, {"units": ["d"]}]
    assert set(texts(list(ask_all(workers[:1], asked, 60, until)))) == {"a", "late"}


def test_results_come_one_by_one_and_the_rest_can_be_given_up(workers: list[Worker]) -> None:
    started = time.monotonic()
    for result in ask_all(workers, requests(["a", "hang"], ["hang"]), 60):
        assert result.unit == "a"
        break
    assert time.monotonic() - started < 30


def test_a_single_request_has_its_answers_and_raises_what_was_lost(workers: list[Worker]) -> None:
    answers = workers[0].ask({"units": ["a", "die"]}, 30)
    assert next(answers)["unit"] == "a"
    with pytest.raises(LostError, match="what it said last"):
        next(answers)
