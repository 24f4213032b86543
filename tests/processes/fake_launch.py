"""A launcher whose processes are all fakes; settings come from the command line as with `python -m launch`.

FAKE_UNDEAD names a process that no signal reaches, as one that waits in the kernel for a broken device.
"""

import os
import sys

from config.machine import Machine
from config.resolve import resolve
from config.schema import ModelArch
from config.sources import read_settings
from launch.fleet import ROLE_MODULES, Engine
from launch.listen import open_listener
from launch.process import Process
from launch.progress import StartDisplay
from launch.supervisor import Supervisor

ARCH = ModelArch(
    family="llama",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=256,
    max_position=512,
)
MACHINE = Machine(cores=2, memory_available=8 << 30)


def _shield(name: str) -> None:
    send_signal = Process.send_signal

    def send(process: Process, number: int) -> None:
        if process.name != name:
            send_signal(process, number)

    Process.send_signal = send  # type: ignore[method-assign]


if __name__ == "__main__":
    if "FAKE_UNDEAD" in os.environ:
        _shield(os.environ["FAKE_UNDEAD"])
    asked = read_settings(["--model", "none", "--port", "0", *sys.argv[1:]], os.environ, "0").config
    resolved = resolve(asked, ARCH, MACHINE)
    engine = Engine(
        config=resolved.config,
        arch=ARCH,
        model_path="none",
        served_names=("it's a fake",),
        kv_memory_bytes=resolved.plan.kv,
        num_blocks=resolved.plan.num_blocks,
        asked=asked,
        machine=MACHINE,
    )
    modules = dict.fromkeys(ROLE_MODULES, "tests.processes.fake_role")
    listener = open_listener(asked.server.host, asked.server.port)
    sys.exit(Supervisor(engine, listener, StartDisplay(), modules).run())
