"""A rank's process: one share of the model, driven by the scheduler's plans.

Nothing here imports torch before `main` has said so: loading it takes a second, and its environment must be set first.
"""

import os
import threading

from config.schema import ChildSpec
from ipc.control import Control, Order

# OpenMP threads that wait for their next share spin for a while; as long as the processes that stream to clients have
# cores of their own that saves a wake-up, and where they share one it takes milliseconds from them.
_PASSIVE_WAITING = {"OMP_WAIT_POLICY": "passive"}


def main(spec: ChildSpec, control: Control) -> int:
    """Load rank `spec.index`, then carry out plans until told to end; the process's exit status."""
    stop = threading.Event()

    def on_order(order: Order) -> None:
        # Drain and Fail alike: the scheduler ends or drains the requests, a rank has nothing of its own to finish.
        stop.set()

    control.listen(on_order)
    control.stage("importing torch")
    for name, value in _PASSIVE_WAITING.items():
        os.environ.setdefault(name, value)
    from gpu_workers.worker import Worker

    worker = Worker(spec, control)
    return worker.serve(stop)
