"""What is read from the requests of the window: how many came, and who sent them."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from config.schema import SchedulerConfig
from scheduler_proc.cost_model import CostModel
from scheduler_proc.diagnosis.diagnoses import MAX_LIVE, looked_at
from scheduler_proc.diagnosis.window import Ended, Totals, Window
from scheduler_proc.diagnosis.workload import MAX_JOBS, Facts, facts_of
from tests.sim.loads import COEFFICIENTS, Observed, load

END = 30.0  # of the load, in seconds


def served(arrival: float, seconds: float) -> Ended:
    return Ended(arrival, arrival, arrival + 0.1 * seconds, arrival + seconds, 50, 0, 0, 20, 20, 0, "", "stop")


def facts(requests: Iterable[Ended]) -> Facts:
    window = Window(16)
    window.ended.extend(sorted((request for request in requests if request.ended < END), key=lambda one: one.ended))
    return facts_of(window, [], Totals(), CostModel.from_coefficients(COEFFICIENTS), END)


def closed_loop(draw: random.Random, clients: int, think: Callable[[], float]) -> list[Ended]:
    """Each client sends its next request so long after an answer."""
    requests = []
    for _ in range(clients):
        now = draw.uniform(0.0, 1.0)
        while now < END:
            requests.append(served(now, draw.uniform(0.4, 1.6)))
            now = requests[-1].ended + think()
    return requests


def open_load(draw: random.Random, gap: Callable[[], float], seconds: tuple[float, float]) -> list[Ended]:
    """Arrivals by themselves, of requests that take from the first to the second of `seconds`."""
    now, requests = gap(), []
    while now < END:
        requests.append(served(now, draw.uniform(*seconds)))
        now += gap()
    return requests


def test_the_queue_ends_with_the_first_step() -> None:
    """Also of requests whose prompts are still being computed: one at once, one after 3 s, one not yet."""
    now = END + 10.0
    live = [
        Ended(arrival, started, 0.0, now, 50, 0, 0, 0, 20, 0, "", "aborted")
        for arrival, started in ((30.0, 30.0), (32.0, 35.0), (36.0, 0.0))
    ]
    found = facts_of(Window(16), live, Totals(), CostModel.from_coefficients(COEFFICIENTS), now)
    assert found.ttft.mean == pytest.approx((10 + 8 + 4) / 3)
    assert found.queue == pytest.approx((0 + 3 + 4) / 3)
    assert found.others == pytest.approx((10 + 5 + 0) / 3)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("clients", [1, 2, 5])
def test_clients_that_send_when_an_answer_has_come_are_counted(clients: int, seed: int) -> None:
    assert facts(closed_loop(random.Random(seed), clients, lambda: 0.001)).load.clients == clients


@pytest.mark.parametrize("seed", range(10))
def test_a_client_that_thinks_for_a_while_is_found(seed: int) -> None:
    draw = random.Random(seed)
    load = facts(closed_loop(draw, 1, lambda: draw.uniform(0.45, 0.55))).load
    assert (load.clients, load.think) == (1, pytest.approx(0.5, abs=0.05))


def without_meeting(draw: random.Random, rate: float, most: float) -> float:
    """A gap of a Poisson load, among those that are longer than any request takes."""
    return most + draw.expovariate(rate)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("gap", "seconds"),
    [
        pytest.param(lambda _: 2.0, (0.1, 0.6), id="by the clock"),
        pytest.param(lambda draw: 2.0 + draw.uniform(-0.01, 0.01), (0.1, 0.6), id="nearly by the clock"),
        pytest.param(lambda _: 1.0, (0.7, 0.99), id="by the clock, hardly a pause"),
        pytest.param(lambda draw: without_meeting(draw, 0.7, 0.4), (0.1, 0.4), id="by chance, without meeting"),
        pytest.param(lambda draw: draw.expovariate(1.0), (0.1, 0.4), id="by chance"),
        pytest.param(lambda draw: draw.expovariate(5.0), (0.5, 1.5), id="by chance, several at once"),
    ],
)
def test_who_sends_by_the_clock_or_by_chance_is_no_client_that_waits_for_answers(
    gap: Callable[[random.Random], float], seconds: tuple[float, float], seed: int
) -> None:
    draw = random.Random(seed)
    assert facts(open_load(draw, lambda: gap(draw), seconds)).load.clients == 0


def test_a_light_load_by_the_clock_gets_no_advice_for_throughput() -> None:
    trace = [replace(request, time=2.0 * number) for number, request in enumerate(load(1, 20, 1, 200, 20))]
    observed = Observed(trace, SchedulerConfig(max_step_tokens=64), 10_000)
    assert observed.facts().load.clients == 0
    [throughput] = [metric for metric in observed.diagnosis().metrics if metric.name == "throughput"]
    assert [cause.setting for cause in throughput.causes] == [""]


def test_requests_are_counted_also_where_they_are_not_kept() -> None:
    observed = Observed(load(1, 1500, 60, 3, 2), SchedulerConfig(), 10_000)
    told = observed.diagnosis()
    assert (told.arrived, told.finished) == (1500, 1500)
    assert len(observed.window.ended) < 1500
    assert len(observed.facts().load.jobs) >= MAX_JOBS


def test_the_look_begins_where_requests_are_kept_from() -> None:
    """Who was running then is known, and who ended before is not missing."""
    observed = Observed(load(2, 1500, 60, 3, 2), SchedulerConfig(), 10_000)
    first = min(job.arrival for job in observed.facts().load.jobs)
    assert first >= observed.window.known_since == observed.window.ended[0].ended
    assert Window(16).known_since < 0


def looked(count: int) -> list[int]:
    """Which of so many requests are looked at, by their numbers."""
    requests = {(b"", number): number for number in range(count)}
    return looked_at(requests)  # type: ignore[arg-type, return-value]  # any values will do


def test_of_many_requests_the_first_and_the_last_are_looked_at() -> None:
    assert looked(0) == []
    assert looked(MAX_LIVE) == list(range(MAX_LIVE))
    found = looked(5 * MAX_LIVE)
    assert len(found) == len(set(found)) == MAX_LIVE
    assert found == sorted(found)
    assert found[-MAX_JOBS:] == list(range(5 * MAX_LIVE))[-MAX_JOBS:]
    assert found[: MAX_LIVE // 2] == list(range(MAX_LIVE // 2))
