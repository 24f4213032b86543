"""The supervisor with fake roles: starting, deaths that end everything, draining, and leaving nothing behind."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes.launcher import PATIENCE, REPOSITORY, Launcher, is_alive, wait_for

NAMES = ("worker-0", "scheduler-0", "tokenizer-0", "frontend-0")


def test_one_ready_line_then_a_signal_drains_in_order_and_exits_zero(launch: Callable[..., Launcher]) -> None:
    launcher = launch()
    launcher.wait_ready()
    [directory] = launcher.run_parent.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in directory.glob("*.json")} == {0o600}
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_end() == 0
    assert re.fullmatch(r"ready http://127\.0\.0\.1:\d+\n", launcher.output)
    assert "curl" in launcher.errors
    # Each role has ended before the next one, further from the clients, is told.
    for earlier, later in zip(
        ("frontend", "tokenizer", "scheduler"), ("tokenizer", "scheduler", "worker"), strict=True
    ):
        assert launcher.position(f"{earlier}-0 end") < launcher.position(f"{later}-0 drain")


@pytest.mark.parametrize("victim", NAMES)
def test_a_death_without_restarts_is_told_to_all_others_and_ends_everything(
    launch: Callable[..., Launcher], victim: str
) -> None:
    """B090."""
    launcher = launch("--max-restarts", "0")
    launcher.wait_ready()
    os.kill(launcher.pids(victim)[0], signal.SIGKILL)
    assert launcher.wait_end() == 1
    reason = f"{victim.replace('-', ' ')} was killed by signal 9 (SIGKILL)"
    for other in NAMES:
        assert (f"{other} fail {reason}" in launcher.events) == (other != victim)
    assert reason in launcher.errors
    assert launcher.output.count("\n") == 1


def test_a_process_that_cannot_be_killed_is_named_and_left_behind(
    launch: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_UNDEAD", "worker 0")
    launcher = launch("--drain-timeout", "1", behaviour={"worker-0": "deaf"})
    launcher.wait_ready()
    launcher.process.send_signal(signal.SIGTERM)
    [pid] = launcher.pids("worker-0")
    assert launcher.process.wait(PATIENCE) == 1  # which one signal alone does not make it
    assert f"worker 0 (process {pid}) does not end even when killed, and is left behind" in launcher.errors
    wait_for(lambda: not is_alive(pid), "the end of a child whose launcher is gone")
    launcher.wait_end()


@pytest.mark.parametrize("behaviour", ["obey", "loading", "deaf"])
def test_no_child_outlives_a_killed_launcher(launch: Callable[..., Launcher], behaviour: str) -> None:
    launcher = launch(behaviour={"worker-0": behaviour, "scheduler-0": behaviour})
    if behaviour == "loading":
        wait_for(lambda: {"worker-0 loading", "scheduler-0 loading"} <= set(launcher.events), "loading")
        wait_for(lambda: {"tokenizer-0 ready", "frontend-0 ready"} <= set(launcher.events), "the others")
    else:
        launcher.wait_ready()
    pids = launcher.pids()
    assert len(pids) == len(NAMES)
    launcher.process.kill()
    launcher.process.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "the children to end")
    # The directory that it could not remove goes when the next run begins.
    [left] = launcher.run_parent.iterdir()
    (launcher.log_file.parent / "next").mkdir()
    program = "from launch.run_dir import RunDirectory\nwith RunDirectory(1) as d: print(d.path)"
    environment = os.environ | {"XDG_RUNTIME_DIR": str(launcher.run_parent)}
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=environment, check=True, capture_output=True)
    assert not left.exists()


def test_a_role_that_cannot_start_is_one_paragraph_and_status_one(launch: Callable[..., Launcher]) -> None:
    launcher = launch(behaviour={"worker-0": "start-error"})
    assert launcher.wait_end() == 1
    assert launcher.errors.count("worker 0 could not start: the weights are upside down; turn the file around.") == 1
    assert "Traceback" not in launcher.errors
    assert launcher.output == ""


@pytest.mark.parametrize(("level", "tracebacks"), [("info", 0), ("debug", 1)])
def test_an_exception_at_start_shows_its_traceback_only_for_debug(
    launch: Callable[..., Launcher], level: str, tracebacks: int
) -> None:
    launcher = launch("--log-level", level, behaviour={"tokenizer-0": "crash"})
    assert launcher.wait_end() == 1
    assert "tokenizer 0 could not start: ValueError: tensor of the wrong shape" in launcher.errors
    assert launcher.errors.count("Traceback") == tracebacks


def test_a_start_that_takes_too_long_names_who_is_late_and_where(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--ready-timeout", "2", behaviour={"worker-0": "loading"})
    assert launcher.wait_end() == 1
    assert "not ready within 2 seconds" in launcher.errors
    assert "worker 0 is at 'loading weights'" in launcher.errors
    assert "--ready-timeout" in launcher.errors


def test_a_death_while_starting_is_not_retried(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--max-restarts", "3", behaviour={"worker-0": "loading"})
    wait_for(lambda: "worker-0 loading" in launcher.events, "loading")
    os.kill(launcher.pids("worker-0")[0], signal.SIGKILL)
    assert launcher.wait_end() == 1
    assert "worker 0 was killed by signal 9 (SIGKILL) while at 'loading weights'" in launcher.errors
    assert len(launcher.pids("worker-0")) == 1


def test_a_deaf_process_is_killed_and_a_busy_one_is_cut_off_by_the_drain_timeout(
    launch: Callable[..., Launcher],
) -> None:
    launcher = launch("--drain-timeout", "0.2", behaviour={"scheduler-0": "deaf", "frontend-0": "busy"})
    launcher.wait_ready()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_end() == 0
    assert "frontend-0 busy" in launcher.events
    assert "still busy" in launcher.errors


def test_a_second_signal_stops_at_once(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--drain-timeout", "600", behaviour={"frontend-0": "busy"})
    launcher.wait_ready()
    launcher.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "frontend-0 busy" in launcher.events, "the drain to begin")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_end() == 1
    assert "tokenizer-0 drain" not in launcher.events


def test_a_signal_while_loading_stops_everything(launch: Callable[..., Launcher]) -> None:
    launcher = launch(behaviour={"worker-0": "loading"})
    wait_for(lambda: "worker-0 loading" in launcher.events, "loading")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait_end() == 0
    assert launcher.output == ""


def test_a_death_while_draining_is_a_failure(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--drain-timeout", "600", behaviour={"frontend-0": "busy"})
    launcher.wait_ready()
    launcher.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "frontend-0 busy" in launcher.events, "the drain to begin")
    os.kill(launcher.pids("worker-0")[0], signal.SIGKILL)
    assert launcher.wait_end() == 1
    assert "frontend-0 fail worker 0 was killed by signal 9 (SIGKILL)" in launcher.events


def test_several_processes_of_a_role_and_a_meeting_point_for_ranks(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--tp", "2", "--frontends", "2", "--tokenizers", "2")
    launcher.wait_ready()
    [directory] = launcher.run_parent.iterdir()
    specs = {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
    assert set(specs) == {
        "worker-0",
        "worker-1",
        "scheduler-0",
        "tokenizer-0",
        "tokenizer-1",
        "frontend-0",
        "frontend-1",
    }
    assert specs["worker-0"]["rendezvous_port"] == specs["worker-1"]["rendezvous_port"] > 0
    assert len(set(specs["scheduler-0"]["endpoints"]["clients"])) == 2
    assert specs["frontend-0"]["listen_fd"] == specs["frontend-1"]["listen_fd"] >= 0
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_end() == 0


def test_a_disk_without_room_for_the_run_directory_is_a_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.fake_launch"],
        cwd=REPOSITORY,
        env=os.environ | {"FAKE_LOG": str(tmp_path / "events"), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),  # smaller than a specification
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.search(rf"worker 0 cannot be started: File too large \(.*{tmp_path}/tokenmill-", done.stderr)
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_when_somebody_has_to_be_replaced_ends_everything_and_says_why(
    launch: Callable[..., Launcher],
) -> None:
    launcher = launch()
    launcher.wait_ready()
    [directory] = launcher.run_parent.iterdir()
    size = (directory / "frontend-0.json").stat().st_size - 1
    assert launcher.error_file.stat().st_size < size - 500, "room for the message"
    resource.prlimit(launcher.process.pid, resource.RLIMIT_FSIZE, (size, size))
    os.kill(launcher.pids("frontend-0")[0], signal.SIGKILL)
    assert launcher.wait_end() == 1
    assert "frontend 0 cannot be started: File too large" in launcher.errors
    assert "Traceback" not in launcher.errors
    assert any(event.startswith("scheduler-0 fail frontend 0 was killed") for event in launcher.events)


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_b090_a_death_just_before_a_signal_still_makes_the_exit_status(
    launch: Callable[..., Launcher], restarts: str
) -> None:
    launcher = launch("--max-restarts", restarts)
    launcher.wait_ready()
    port = int(launcher.output.rpartition(":")[2])
    os.kill(launcher.pids("worker-0")[0], signal.SIGKILL)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_end() == 1  # with no child left
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_api_keys_reach_only_frontends(launch: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch) -> None:
    key = "a-key-that-nobody-guesses"
    monkeypatch.setenv("TOKENMILL_API_KEYS", key)
    launcher = launch("--frontends", "2")
    launcher.wait_ready()
    for name in (*NAMES, "frontend-1"):
        [pid] = launcher.pids(name)
        process = Path(f"/proc/{pid}")
        assert (key.encode() in (process / "environ").read_bytes()) == name.startswith("frontend")
        assert key.encode() not in (process / "cmdline").read_bytes()
    [directory] = launcher.run_parent.iterdir()
    for file in directory.glob("*.json"):
        assert key not in file.read_text()
    launcher.process.send_signal(signal.SIGTERM)
    launcher.wait_end()
    assert key not in launcher.errors + launcher.output
