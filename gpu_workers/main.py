"""A rank's process: one share of the model, driven by the scheduler's plans.

Nothing here imports torch before `main` has said so, since loading it takes a second or more.
"""

import threading

from config.schema import ChildSpec
from ipc.control import Control, Order


def main(spec: ChildSpec, control: Control) -> int:
    """Load rank `spec.index`, then carry out plans until told to end; the process's exit status."""
    stop = threading.Event()

    def on_order(order: Order) -> None:
        # Drain and Fail alike: the scheduler ends or drains the requests, a rank has nothing of its own to finish.
        stop.set()

    control.listen(on_order)
    control.stage("importing torch")
    from gpu_workers.worker import Worker

    worker = Worker(spec, control)
    return worker.serve(stop)
