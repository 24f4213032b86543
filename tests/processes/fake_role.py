"""A role that does nothing but obey, for tests of the supervisor alone.

The environment says how each process behaves (FAKE_BEHAVIOUR: JSON, name -> behaviour) and where all of them write down
what happens to them (FAKE_LOG). Without an entry a process becomes ready, and ends when it is told to. A list has one
behaviour for each life of a place: the first for the first process there, and the last for all further ones.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

from config.schema import ChildSpec
from ipc.control import Control, Drain, Fail, Idle, Order, StartError, Unresponsive


def _behaviour(name: str, log: Path) -> str:
    behaviour = json.loads(os.environ.get("FAKE_BEHAVIOUR", "{}")).get(name, "obey")
    if isinstance(behaviour, str):
        return behaviour
    lives = sum(line.startswith(f"{name} pid") for line in log.read_text().splitlines())
    return behaviour[min(lives, len(behaviour) - 1)]


def main(spec: ChildSpec, control: Control) -> int:
    name = f"{spec.role}-{spec.index}"
    log = Path(os.environ["FAKE_LOG"])
    behaviour = _behaviour(name, log)

    def write(event: str) -> None:
        with log.open("a") as file:
            file.write(f"{name} {event}\n")

    write(f"pid {os.getpid()}")
    write(f"incarnation {spec.incarnation}")
    write(f"rendezvous {spec.rendezvous_port}")
    if behaviour == "start-error":
        raise StartError("the weights are upside down; turn the file around.")
    if behaviour == "crash":
        raise ValueError("tensor of the wrong shape")
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour in ("loading", "deaf-loading"):
        control.stage("loading weights", 0.5)
        write("loading")
        time.sleep(600)

    if behaviour == "slow":
        control.stage("loading weights", 0.5)
        time.sleep(1.0)

    ended = threading.Event()

    def on_order(order: Order) -> None:
        match order:
            case Drain():
                write("drain")
                if behaviour == "busy":
                    write("busy")
                    return
                if behaviour == "finishes-slowly":
                    time.sleep(2.0)
                control.report(Idle())
            case Fail(reason):
                write(f"fail {reason}")
        if behaviour != "deaf":
            ended.set()

    def on_accusation(number: int, frame: object) -> None:
        of_whom = spec.incarnation - behaviour.endswith("predecessors")
        control.report(Unresponsive(of_whom, "no result of step 7 within 2 s"))
        write("accused")

    if behaviour.startswith("accuses"):
        signal.signal(signal.SIGUSR1, on_accusation)  # the ranks that started with it, or older ones

    def on_accident(number: int, frame: object) -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("the dog ate it\nall of it")])

    if behaviour == "fails":
        signal.signal(signal.SIGUSR1, on_accident)
    control.listen(on_order)
    control.ready()
    write("ready")
    ended.wait()
    write("end")
    return 0
