"""The supervisor with fake roles: who is replaced after a death, how often, and when it gives up."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.processes.launcher import Launcher, is_alive, wait_for

Launch = Callable[..., Launcher]
TWO_OF_EACH = ("--tp", "2", "--tokenizers", "2", "--frontends", "2")
PLACES = ("worker-0", "worker-1", "scheduler-0", "tokenizer-0", "tokenizer-1", "frontend-0", "frontend-1")


def kill(launcher: Launcher, name: str) -> int:
    """Kill -9 the present process of a place; its pid."""
    pid = launcher.pids(name)[-1]
    os.kill(pid, signal.SIGKILL)
    return pid


def noted(launcher: Launcher, name: str, what: str) -> list[int]:
    """A number that each process of a place has written down."""
    return [int(event.split()[2]) for event in launcher.events if event.startswith(f"{name} {what} ")]


# Whom the supervisor starts anew when one has died.
REPLACED = [
    ("worker-1", {"worker-0", "worker-1"}),
    ("scheduler-0", {"scheduler-0", "worker-0", "worker-1"}),
    ("tokenizer-1", {"tokenizer-1"}),
    ("frontend-0", {"frontend-0"}),
]


def stop(launcher: Launcher) -> int:
    launcher.process.send_signal(signal.SIGTERM)
    return launcher.wait_end()


@pytest.mark.parametrize(("victim", "replaced"), REPLACED)
def test_a_death_replaces_only_those_who_cannot_go_on_without_the_dead(
    launch: Launch, victim: str, replaced: set[str]
) -> None:
    launcher = launch(*TWO_OF_EACH)
    launcher.wait_ready()
    killed = kill(launcher, victim)
    wait_for(lambda: "back after" in launcher.errors, "the recovery")
    assert {place: launcher.lives(place) for place in PLACES} == {place: 1 + (place in replaced) for place in PLACES}
    for place in PLACES:
        assert is_alive(launcher.pids(place)[-1])
        assert sum(map(is_alive, launcher.pids(place))) == 1
        before, *after = noted(launcher, place, "incarnation")
        assert all(incarnation > before for incarnation in after)
    assert noted(launcher, "worker-0", "rendezvous") == noted(launcher, "worker-1", "rendezvous")
    if "worker-0" in replaced:
        first, second = noted(launcher, "worker-0", "rendezvous")
        assert first != second
    assert len({noted(launcher, place, "incarnation")[-1] for place in replaced}) == 1
    reason = f"{victim.replace('-', ' ')} was killed by signal 9 (SIGKILL); restarting"
    assert launcher.errors.count(reason) == 1
    assert "(1 of 3 restarts within a minute)" in launcher.errors
    assert launcher.errors.count("was killed by") == 1, "a process that was told to end has not died"
    # Nobody was told that the engine is lost, and there is one ready line only.
    assert not any(" fail " in event or " drain" in event for event in launcher.events)
    assert launcher.output.count("\n") == 1
    assert stop(launcher) == 1, "a run in which something died is no success"
    assert killed in launcher.pids(victim)


def test_private_specs(launch: Launch) -> None:
    launcher = launch()
    launcher.wait_ready()
    kill(launcher, "frontend-0")
    wait_for(lambda: "frontend 0 is back after" in launcher.errors, "the recovery")
    [directory] = launcher.run_parent.iterdir()
    assert {file.stat().st_mode & 0o777 for file in directory.glob("*.json")} == {0o600}
    spec = json.loads((directory / "frontend-0.json").read_text())
    assert spec["incarnation"] == noted(launcher, "frontend-0", "incarnation")[1]
    assert stop(launcher) == 1


@pytest.mark.parametrize("victims", [("tokenizer-0", "frontend-0"), ("worker-0", "tokenizer-0", "worker-1")])
def test_the_limit_counts_the_deaths_of_all_processes(launch: Launch, victims: tuple[str, ...]) -> None:
    allowed = len(victims) - 1
    launcher = launch("--tp", "2", "--max-restarts", str(allowed))
    launcher.wait_ready()
    for number, victim in enumerate(victims, start=1):
        kill(launcher, victim)
        if number <= allowed:
            wait_for(lambda count=number: launcher.errors.count("back after") == count, "the recovery")
    assert launcher.wait_end() == 1
    reason = f"{victims[-1].replace('-', ' ')} was killed by signal 9 (SIGKILL)"
    assert f"{reason}; giving up, as --max-restarts allows {allowed} within a minute" in launcher.errors
    assert any(event.startswith(f"scheduler-0 fail {reason}") for event in launcher.events)
    assert launcher.output.count("\n") == 1


def test_deaths_that_come_together_are_all_made_good(launch: Launch) -> None:
    launcher = launch(*TWO_OF_EACH, "--max-restarts", "4")
    launcher.wait_ready()
    for victim in ("worker-0", "scheduler-0", "tokenizer-1", "frontend-0"):
        kill(launcher, victim)
    wait_for(
        lambda: all(launcher.lives(place) >= 2 for place in PLACES if place not in ("tokenizer-0", "frontend-1")),
        "the successors",
    )
    wait_for(lambda: launcher.errors.count("back after") == 3, "their start")
    assert launcher.lives("tokenizer-0") == launcher.lives("frontend-1") == 1
    assert all(sum(map(is_alive, launcher.pids(place))) == 1 for place in PLACES)
    assert stop(launcher) == 1


def test_a_death_during_a_recovery_counts_again_and_begins_it_anew(launch: Launch) -> None:
    launcher = launch("--tp", "2", "--max-restarts", "2", behaviour={"worker-1": ["obey", "loading", "obey"]})
    launcher.wait_ready()
    kill(launcher, "worker-0")
    wait_for(lambda: "worker-1 loading" in launcher.events and launcher.lives("worker-0") == 2, "the second life")
    kill(launcher, "worker-1")
    wait_for(lambda: "worker 0, worker 1 are back after" in launcher.errors, "the recovery")
    assert launcher.lives("worker-0") == launcher.lives("worker-1") == 3
    assert launcher.lives("scheduler-0") == 1
    assert "(2 of 2 restarts within a minute)" in launcher.errors
    assert stop(launcher) == 1


def test_the_scheduler_may_die_while_ranks_come_back(launch: Launch) -> None:
    launcher = launch(behaviour={"worker-0": ["obey", "loading", "obey"]})
    launcher.wait_ready()
    kill(launcher, "worker-0")
    wait_for(lambda: "worker-0 loading" in launcher.events, "the second life")
    loading = launcher.pids("worker-0")[-1]
    kill(launcher, "scheduler-0")
    wait_for(lambda: "scheduler 0, worker 0 are back after" in launcher.errors, "the recovery")
    assert not is_alive(loading)
    assert launcher.lives("worker-0") == 3
    assert launcher.errors.count("back after") == 1
    assert stop(launcher) == 1


def test_ranks_may_die_while_their_scheduler_comes_back(launch: Launch) -> None:
    behaviour = {"worker-0": ["obey", "loading", "obey"], "scheduler-0": ["obey", "slow"]}
    launcher = launch(behaviour=behaviour)
    launcher.wait_ready()
    kill(launcher, "scheduler-0")
    wait_for(lambda: "worker-0 loading" in launcher.events, "the second life")
    kill(launcher, "worker-0")
    wait_for(lambda: "worker 0 is back after" in launcher.errors, "the ranks")
    wait_for(lambda: "scheduler 0 is back after" in launcher.errors, "the scheduler")
    assert launcher.lives("scheduler-0") == 2
    assert launcher.lives("worker-0") == 3
    assert stop(launcher) == 1


def test_ranks_that_do_not_come_back_in_time_end_everything(launch: Launch) -> None:
    launcher = launch("--recovery-timeout", "1", behaviour={"worker-0": ["obey", "loading"]})
    launcher.wait_ready()
    kill(launcher, "worker-0")
    assert launcher.wait_end() == 1
    reason = "worker 0 was killed by signal 9 (SIGKILL) and was not back within --recovery-timeout 1 seconds"
    assert f"{reason}: worker 0 is at 'loading weights'" in launcher.errors
    for other in ("scheduler-0", "tokenizer-0", "frontend-0"):
        assert any(event.startswith(f"{other} fail {reason}") for event in launcher.events)


def test_repeated_deaths_do_not_stretch_the_recovery_timeout(launch: Launch) -> None:
    behaviour = {"worker-0": ["obey", "loading"]}
    launcher = launch("--recovery-timeout", "4", "--max-restarts", "1000", behaviour=behaviour)
    launcher.wait_ready()
    began = time.monotonic()
    while launcher.process.poll() is None and time.monotonic() < began + 30:
        lives = launcher.lives("worker-0")
        with contextlib.suppress(ProcessLookupError):  # the launcher has just given up
            kill(launcher, "worker-0")
        wait_for(
            lambda before=lives: launcher.lives("worker-0") > before or launcher.process.poll() is not None,
            "the next life or the end",
        )
    assert launcher.wait_end() == 1
    assert launcher.lives("worker-0") > 2
    assert "was not back within --recovery-timeout 4 seconds" in launcher.errors


@pytest.mark.parametrize("victim", ["worker-0", "tokenizer-0"])
def test_a_successor_that_cannot_start_ends_everything_and_says_why(launch: Launch, victim: str) -> None:
    launcher = launch(behaviour={victim: ["obey", "start-error"]})
    launcher.wait_ready()
    kill(launcher, victim)
    assert launcher.wait_end() == 1
    reason = f"{victim.replace('-', ' ')} could not start: the weights are upside down; turn the file around."
    assert launcher.errors.count(reason) == 1
    assert f"scheduler-0 fail {reason}" in launcher.events
    assert launcher.lives(victim) == 2


def test_ranks_that_hang_are_killed_and_replaced(launch: Launch) -> None:
    launcher = launch("--tp", "2", behaviour={"scheduler-0": "accuses", "worker-0": "deaf", "worker-1": "deaf"})
    launcher.wait_ready()
    os.kill(launcher.pids("scheduler-0")[0], signal.SIGUSR1)
    wait_for(lambda: "worker 0, worker 1 are back after" in launcher.errors, "the recovery")
    assert "worker 0 was killed because it hangs: no result of step 7 within 2 s; restarting" in launcher.errors
    assert launcher.lives("worker-0") == launcher.lives("worker-1") == 2
    assert launcher.lives("scheduler-0") == 1
    assert stop(launcher) == 1


def test_processes_that_are_stopped_are_replaced_as_dead_ones_are(launch: Launch) -> None:
    launcher = launch(*TWO_OF_EACH, "--hang-timeout", "1.5", "--max-restarts", "3")
    launcher.wait_ready()
    victims = {victim: launcher.pids(victim)[0] for victim in ("worker-1", "tokenizer-1", "frontend-0")}
    for pid in victims.values():
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: launcher.errors.count("back after") == 3, "the recovery")
    for victim, pid in victims.items():
        assert f"{victim.replace('-', ' ')} was killed because it hangs: no sign of life for " in launcher.errors
        assert not is_alive(pid)
    replaced = {"worker-0", *victims}
    assert {place: launcher.lives(place) for place in PLACES} == {place: 1 + (place in replaced) for place in PLACES}
    assert stop(launcher) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "replaced"), REPLACED)
def test_a_stopped_process_takes_along_whom_a_dead_one_would(launch: Launch, victim: str, replaced: set[str]) -> None:
    launcher = launch(*TWO_OF_EACH, "--hang-timeout", "3")
    launcher.wait_ready()
    os.kill(launcher.pids(victim)[0], signal.SIGSTOP)
    wait_for(lambda: "back after" in launcher.errors, "the recovery")
    assert {place: launcher.lives(place) for place in PLACES} == {place: 1 + (place in replaced) for place in PLACES}
    assert stop(launcher) == 1


@pytest.mark.slow
def test_a_stopped_process_ends_everything_where_a_death_would(launch: Launch) -> None:
    launcher = launch("--hang-timeout", "2", "--max-restarts", "0")
    launcher.wait_ready()
    os.kill(launcher.pids("tokenizer-0")[0], signal.SIGSTOP)
    assert launcher.wait_end() == 1
    reason = "tokenizer 0 was killed because it hangs: no sign of life for 2 s"
    assert any(event.startswith(f"frontend-0 fail {reason}") for event in launcher.events)


@pytest.mark.slow
def test_a_stopped_launcher_does_not_take_the_others_for_dead(launch: Launch) -> None:
    launcher = launch("--hang-timeout", "2")
    launcher.wait_ready()
    os.kill(launcher.process.pid, signal.SIGSTOP)
    time.sleep(5)  # longer than any of them may be silent
    os.kill(launcher.process.pid, signal.SIGCONT)
    time.sleep(2)
    assert stop(launcher) == 0
    assert all(launcher.lives(f"{role}-0") == 1 for role in ("worker", "scheduler", "tokenizer", "frontend"))


def test_ranks_are_told_whether_one_before_them_crashed(launch: Launch) -> None:
    launcher = launch("--tp", "2")
    launcher.wait_ready()
    [directory] = launcher.run_parent.iterdir()
    for life, (number, crash) in enumerate([(signal.SIGSEGV, True), (signal.SIGKILL, False)], 1):
        os.kill(launcher.pids("worker-1")[-1], number)
        wait_for(lambda count=life: launcher.errors.count("back after") == count, "the recovery")
        specs = {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
        assert specs["worker-0"]["after_crash"] is specs["worker-1"]["after_crash"] is crash
        assert specs["scheduler-0"]["after_crash"] is False
    assert stop(launcher) == 1


def test_ranks_hear_of_a_crash_also_where_their_predecessors_never_came_up(launch: Launch) -> None:
    launcher = launch(behaviour={"worker-0": ["obey", "loading", "obey"]})
    launcher.wait_ready()
    os.kill(launcher.pids("worker-0")[0], signal.SIGSEGV)
    wait_for(lambda: "worker-0 loading" in launcher.events, "the second life")
    os.kill(launcher.pids("worker-0")[1], signal.SIGKILL)
    wait_for(lambda: "back after" in launcher.errors, "the recovery")
    [directory] = launcher.run_parent.iterdir()
    assert json.loads((directory / "worker-0.json").read_text())["after_crash"] is True
    assert stop(launcher) == 1


@pytest.mark.parametrize(("level", "shown"), [("info", False), pytest.param("debug", True, marks=pytest.mark.slow)])
def test_an_error_of_a_running_process_is_one_line(launch: Launch, level: str, shown: bool) -> None:
    launcher = launch("--log-level", level, behaviour={"tokenizer-0": ["fails", "obey"]})
    launcher.wait_ready()
    os.kill(launcher.pids("tokenizer-0")[0], signal.SIGUSR1)
    wait_for(lambda: "tokenizer 0 is back after" in launcher.errors, "the recovery")
    [line] = [line for line in launcher.errors.splitlines() if "ValueError: the dog ate it;" in line]
    assert "tokenizer-0 ERROR" in line
    assert line.endswith("this process ends (--log-level debug shows where)")
    assert ("Traceback" in launcher.errors) == shown
    assert stop(launcher) == 1


def test_a_report_about_ranks_that_are_gone_does_not_harm_their_successors(launch: Launch) -> None:
    launcher = launch(behaviour={"scheduler-0": "accuses predecessors"})
    launcher.wait_ready()
    os.kill(launcher.pids("scheduler-0")[0], signal.SIGUSR1)
    wait_for(lambda: "scheduler-0 accused" in launcher.events, "the report")
    assert stop(launcher) == 0
    assert launcher.lives("worker-0") == 1


def test_a_signal_during_a_recovery_lets_it_go_on_while_requests_run(launch: Launch) -> None:
    behaviour = {"worker-0": ["obey", "slow"], "frontend-0": "finishes-slowly"}
    launcher = launch(behaviour=behaviour)
    launcher.wait_ready()
    kill(launcher, "worker-0")
    wait_for(lambda: launcher.lives("worker-0") == 2, "the second life")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_end() == 1
    assert "worker 0 is back after" in launcher.errors
    for role in ("frontend", "tokenizer", "scheduler"):
        assert f"{role}-0 drain" in launcher.events
    assert not any(" fail " in event for event in launcher.events)


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0", "tokenizer-0", "frontend-0"])
def test_a_signal_ends_a_recovery_that_nobody_waits_for(launch: Launch, victim: str) -> None:
    launcher = launch(behaviour={victim: ["obey", "loading"]})
    launcher.wait_ready()
    kill(launcher, victim)
    wait_for(lambda: f"{victim} loading" in launcher.events, "the second life")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_end() == 1
    assert launcher.lives(victim) == 2


def test_two_signals_during_a_recovery_stop_at_once(launch: Launch) -> None:
    launcher = launch(behaviour={"worker-0": ["obey", "deaf-loading"], "frontend-0": "busy"})
    launcher.wait_ready()
    kill(launcher, "worker-0")
    wait_for(lambda: "worker-0 loading" in launcher.events, "the second life")
    launcher.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "frontend-0 busy" in launcher.events, "the drain")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_end() == 1
    assert "tokenizer-0 drain" not in launcher.events


def test_no_child_outlives_a_launcher_killed_during_a_recovery(launch: Launch) -> None:
    launcher = launch("--tp", "2", behaviour={"worker-0": ["obey", "loading"]})
    launcher.wait_ready()
    kill(launcher, "worker-1")
    wait_for(lambda: "worker-0 loading" in launcher.events, "the second life")
    launcher.process.kill()
    launcher.process.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in launcher.pids()), "the children to end")
